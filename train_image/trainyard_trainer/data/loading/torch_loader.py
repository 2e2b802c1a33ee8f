"""Batches from a torch DataLoader: each worker picks its share of every batch from this machine's copy."""

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

from trainyard_trainer.config.batch_share import share_batch
from trainyard_trainer.config.data import Data
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch, order_of_epoch, parts_of_epoch
from trainyard_trainer.data.loading.chunks import Ahead
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.prepared import DatasetInfo, Prepared
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.run_folder.progress import Length, Trained

BATCHES_AHEAD = 4
"""Batches that each decoding process makes before they are asked for."""


class GlobalBatches(Sampler[np.ndarray]):
    """This worker's indices, batch by batch, of an order that all workers agree on.

    Global batch i is a stretch of one permutation, which depends on seed and epoch alone; each worker takes
    its part of the stretch, the first ones a sample more where it cannot be even. So every step
    learns from the same samples at any number of workers.
    """

    def __init__(self, length: Length, worker: Worker, *, shuffle: bool, seed: int) -> None:
        self.length = length
        self.worker = worker
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.first_step = 0

    def __len__(self) -> int:
        return self.length.steps_per_epoch - self.first_step

    def __iter__(self) -> Iterator[np.ndarray]:
        order = order_of_epoch(
            self.length.num_samples, self.epoch, seed=self.seed, shuffle=self.shuffle
        )
        rest = order[self.first_step * self.length.global_batch_size :]
        worker = self.worker
        return parts_of_epoch(rest, self.length, self.first_step, worker.rank, worker.world_size)


class TorchBatches:
    """Training batches of one worker from a torch DataLoader."""

    def __init__(
        self,
        prepared: Prepared,
        length: Length,
        start: Trained,
        worker: Worker,
        config: TrainerConfig,
    ) -> None:
        self.start = start
        self.sampler = GlobalBatches(
            length, worker, shuffle=config.data.shuffle, seed=config.train.seed
        )
        processes = decode_workers(config.data, config.scaling, prepared.info)
        rows = LocalCopy(prepared, prepared.train, is_pinned=worker.device.type == "cuda")
        self.loader = load(rows, self.sampler, processes, worker)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.sampler.epoch = epoch
        is_begun = epoch == self.start.epoch
        self.sampler.first_step = self.start.steps_in_epoch if is_begun else 0
        return iterate(self.loader)

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing: the order follows from seed and epoch."""
        return {}


class ValidationBatches:
    """Every world_size-th validation image, from the rank-th on: together the workers see each once.

    All workers have the same number of batches; those at the end may be empty.
    """

    def __init__(self, prepared: Prepared, worker: Worker, config: TrainerConfig) -> None:
        self.indices = np.arange(worker.rank, prepared.num_valid, worker.world_size)
        # Without gradients there is room for more than in training.
        size = 2 * share_batch(config.train, worker.world_size).micro_batch_size
        most = -(-prepared.num_valid // worker.world_size)
        batches = [self.indices[start : start + size] for start in range(0, most, size)]
        processes = decode_workers(config.data, config.scaling, prepared.info)
        rows = LocalCopy(prepared, prepared.valid, is_pinned=worker.device.type == "cuda")
        self.loader = load(rows, batches, processes, worker)

    def __iter__(self) -> Iterator[Batch]:
        return iterate(self.loader)


def decode_workers(data: Data, scaling: Scaling, info: DatasetInfo) -> int:
    """Processes of one worker that make batches; with none, the worker itself does."""
    if data.decode_workers is not None:
        return data.decode_workers
    return scaling.cpus_per_worker - 1 if info.encoding == "encoded" else 0


def load(
    rows: LocalCopy, batches: Sampler[np.ndarray] | list[np.ndarray], processes: int, worker: Worker
) -> DataLoader[Batch]:
    """A loader of batches, given the indices of each."""
    several: dict[str, Any] = {}
    if processes:
        # To fork a process that has threads, as Ray's workers do, may hang; importing torch takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])
        start_server()
        several = {
            "multiprocessing_context": context,
            "persistent_workers": True,
            "prefetch_factor": BATCHES_AHEAD,
            "worker_init_fn": leave_group,
        }
    return DataLoader(
        rows,
        sampler=batches,
        batch_size=None,  # an item is a batch already
        num_workers=processes,
        pin_memory=worker.device.type == "cuda",
        # Of its own, so that starting an epoch twice leaves the model's random numbers as they are.
        generator=torch.Generator(),
        **several,
    )


def iterate(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """The batches. What a GPU waits for is made while it computes, by a thread if not by processes."""
    if loader.pin_memory and not loader.num_workers:
        return Ahead(loader, BATCHES_AHEAD)
    return iter(loader)


def start_server() -> None:
    """Start the process from which others are forked; with SIGTERM held back, as `leave_group` tells."""
    resource_tracker.ensure_running()  # Python would do it next, and let SIGTERM through again
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def leave_group(number: int) -> None:
    """In a decoding process: torchrun sends SIGTERM to a worker's whole group, and the worker, which then
    saves, still needs batches."""
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
