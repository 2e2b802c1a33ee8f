"""Batches from a PyTorch DataLoader: each worker takes its share of every batch from the machine's copy."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from trainyard_trainer.child_process import end_with_parent
from trainyard_trainer.config.data.section import Loading
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.data.loading.batch import Batch, order_of_epoch, parts_of_epoch
from trainyard_trainer.data.loading.chunks import Ahead
from trainyard_trainer.data.loading.rows import (
    DataInfo,
    IndexBatches,
    Requests,
    RunData,
    open_rows,
    stream_of,
)
from trainyard_trainer.data.loading.stream_order import StreamOrder
from trainyard_trainer.data.loading.user_dataset import (
    Collate,
    SplitName,
    UserDataInfo,
    UserRows,
    stacked,
)
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

BATCHES_AHEAD = 4
"""The number of batches that each decoding process prefetches."""


class GlobalBatches(Sampler[np.ndarray]):
    """The indices of a worker's part of each global batch.

    Global batch i is a slice of one order, which depends on seed and epoch alone. Each worker takes its
    part of the slice; the first workers take one sample more if it cannot be divided evenly. So every step
    uses the same samples with any number of workers.
    """

    def __init__(
        self,
        length: Length,
        worker: Worker,
        *,
        shuffle: bool,
        seed: int,
        stream: StreamOrder | None = None,
    ) -> None:
        self.length = length
        self.worker = worker
        self.shuffle = shuffle
        self.seed = seed
        self.stream = stream
        self.epoch = 0
        self.first_step = 0

    def __len__(self) -> int:
        return self.length.steps_per_epoch - self.first_step

    def begin(self, epoch: int, start: Trained) -> None:
        """Go to an epoch: to its first batch, or behind those that were trained before the run's start."""
        self.epoch = epoch
        self.first_step = start.steps_in_epoch if epoch == start.epoch else 0

    def __iter__(self) -> Iterator[np.ndarray]:
        if self.stream and self.shuffle:
            order = self.stream.of_epoch(
                self.epoch, seed=self.seed, batch_size=self.length.global_batch_size
            )
        else:
            order = order_of_epoch(
                self.length.num_samples, self.epoch, seed=self.seed, shuffle=self.shuffle
            )
        rest = order[self.first_step * self.length.global_batch_size :]
        worker = self.worker
        return parts_of_epoch(rest, self.length, self.first_step, worker.rank, worker.world_size)


class TorchBatches:
    """The training batches of one worker, from a PyTorch DataLoader."""

    def __init__(
        self,
        data: RunData,
        length: Length,
        start: Trained,
        worker: Worker,
        config: TrainerConfig,
        collate: Collate = stacked,
    ) -> None:
        self.start = start
        self.sampler = GlobalBatches(
            length,
            worker,
            shuffle=config.data.shuffle,
            seed=config.train.seed,
            stream=stream_of(data),
        )
        self.loader = load(data, "train", self.sampler, worker, config, collate)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.sampler.begin(epoch, self.start)
        if isinstance(self.loader.sampler, Requests):
            self.loader.sampler.epoch = epoch
        return iterate(self.loader)

    def state(self) -> dict[str, torch.Tensor]:
        """Return an empty state: the order follows from seed and epoch."""
        return {}


class ValidationBatches:
    """Every world_size-th validation sample, from sample `rank` on: together the workers see each one once.

    All workers have the same number of batches; the last ones may be empty.
    """

    def __init__(
        self, data: RunData, worker: Worker, config: TrainerConfig, collate: Collate = stacked
    ) -> None:
        self.indices = np.arange(worker.rank, data.num_valid, worker.world_size)
        # Without gradients, more samples fit into memory than in training.
        size = 2 * share_batch(config.train, worker.world_size).micro_batch_size
        most = -(-data.num_valid // worker.world_size)
        batches = [self.indices[start : start + size] for start in range(0, most, size)]
        self.loader = load(data, "valid", batches, worker, config, collate)

    def __iter__(self) -> Iterator[Batch]:
        return iterate(self.loader)


def decode_workers(data: Loading, scaling: Scaling, info: DataInfo) -> int:
    """Return the number of processes of one worker that make batches; 0 if the worker makes them itself."""
    if data.decode_workers is not None:
        return data.decode_workers
    is_costly = isinstance(info, UserDataInfo) or info.encoding == "encoded"
    return scaling.cpus_per_worker - 1 if is_costly else 0


def load(
    data: RunData,
    split: SplitName,
    batches: IndexBatches,
    worker: Worker,
    config: TrainerConfig,
    collate: Collate,
) -> DataLoader[Batch]:
    """Return a DataLoader of batches, given the indices of each batch."""
    is_pinned = worker.device.type == "cuda"
    rows = open_rows(data, split, seed=config.train.seed, collate=collate, is_pinned=is_pinned)
    processes = decode_workers(config.data, config.scaling, data.info)
    several: dict[str, Any] = {}
    if processes:
        # A fork of a process with threads, such as a Ray worker, may hang. Importing torch takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])
        start_server()
        several = {
            "multiprocessing_context": context,
            "persistent_workers": True,
            "prefetch_factor": BATCHES_AHEAD,
            "worker_init_fn": begin_decoding,
        }
    return DataLoader(
        rows,
        sampler=Requests(batches) if isinstance(rows, UserRows) else batches,
        batch_size=None,  # an item is a batch already
        num_workers=processes,
        pin_memory=is_pinned,
        # Its own generator, so that iterating does not change the random numbers of the model.
        generator=torch.Generator(),
        **several,
    )


def iterate(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """Iterate over the batches. For a GPU they are prefetched, by a thread if there are no processes.

    A data set of the user is not read in a thread: it sets the seeds of the process's random numbers.
    """
    if loader.pin_memory and not loader.num_workers and not isinstance(loader.dataset, UserRows):
        return Ahead(loader, BATCHES_AHEAD)
    return iter(loader)


def start_server() -> None:
    """Start the process from which the others are forked, with SIGTERM blocked: see `begin_decoding`."""
    resource_tracker.ensure_running()  # otherwise Python does it next, and unblocks SIGTERM
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def begin_decoding(number: int) -> None:
    """Leave the process group of the worker, and end when the worker has ended; in a decoding process.

    torchrun sends SIGTERM to the whole group of a worker, which still needs batches until it has saved. A
    worker that is killed cannot end its decoding processes, and the DataLoader's own watchdog sees only the
    process from which they were forked.
    """
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_parent()
