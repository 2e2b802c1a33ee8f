"""Batches from memory: each worker reads the Parquet file once and picks its share of every batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.data.parquet import Images, decode
from trainer.folder import RunFolder

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (N, C, H, W) uint8 and labels (N,) int64."""


class ParquetImages(Dataset[Batch]):
    """Images of a Parquet file in memory; an item is a whole batch, given its indices."""

    def __init__(self, folder: RunFolder, path: str, images: Images) -> None:
        with folder.filesystem.open_input_file(path) as file:
            columns = decode(pq.read_table(file), images)
        self.ids = columns["id"]
        # Copied, because torch wants memory that may be written to.
        self.pixels = torch.from_numpy(columns["image"].copy())
        self.labels = torch.from_numpy(columns["label"].copy())

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: np.ndarray) -> Batch:
        return self.pixels[indices], self.labels[indices]


class GlobalBatches(Sampler[np.ndarray]):
    """This worker's indices, batch by batch, of an order that all workers agree on.

    Global batch i is a stretch of one permutation, which depends on seed and epoch alone; each worker takes
    its equal part of the stretch. So every step learns from the same samples at any number of
    workers. What does not fill a batch is left out of that epoch.
    """

    def __init__(
        self,
        count: int,
        global_batch_size: int,
        *,
        rank: int,
        world_size: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.count = count
        self.global_batch_size = global_batch_size
        self.share = global_batch_size // world_size
        self.first = rank * self.share
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.count // self.global_batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.arange(self.count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        for step in range(len(self)):
            start = step * self.global_batch_size + self.first
            yield order[start : start + self.share]


class TorchBatches:
    """Training batches of one worker from a torch DataLoader."""

    def __init__(self, dataset: ParquetImages, sampler: GlobalBatches, *, pin_memory: bool) -> None:
        self.sampler = sampler
        # batch_size=None: the sampler's indices go to the data set at once, not one by one.
        self.loader = DataLoader(dataset, sampler=sampler, batch_size=None, pin_memory=pin_memory)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.sampler.epoch = epoch
        return iter(self.loader)


class ValidationBatches:
    """Every world_size-th validation image, from the rank-th on: together the workers see each once."""

    def __init__(
        self, dataset: ParquetImages, *, batch_size: int, rank: int, world_size: int
    ) -> None:
        self.dataset = dataset
        self.indices = np.arange(rank, len(dataset), world_size)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.indices), self.batch_size):
            yield self.dataset[self.indices[start : start + self.batch_size]]
