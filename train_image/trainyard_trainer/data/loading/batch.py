"""What a loader hands to the loop, the two promises that it makes, and how a global batch is shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trainyard_trainer.run_folder.progress import Length


class Batch(NamedTuple):
    """One worker's share of one global batch."""

    pixels: torch.Tensor
    """(N, C, H, W) uint8; of text (N, 1, 1, bytes)."""
    labels: torch.Tensor
    """(N,) int64."""
    ids: torch.Tensor
    """(N,) int64: the samples' row numbers in their split."""


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; from pinned memory without waiting for it."""
    return Batch(*(column.to(device, non_blocking=True) for column in batch))


class Batches(Protocol):
    """Training batches of one worker, from where the run goes on.

    Each worker gets as many batches of an epoch as every other, and each sample comes to one of them at
    most once in an epoch, also when the epoch was begun by another number of workers.
    """

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, counted from 0; of the epoch under way those that are left."""

    def state(self) -> dict[str, torch.Tensor]:
        """What must be known beside the number of samples to go on after the batch handed out last.

        All workers ask at the same step, since they may have to tell each other.
        """


def order_of_epoch(num_samples: int, epoch: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """All samples, in an order that depends on seed and epoch alone."""
    if not shuffle:
        return np.arange(num_samples)
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def parts_of_epoch(
    order: np.ndarray, length: Length, first_step: int, rank: int, world_size: int
) -> Iterator[np.ndarray]:
    """A worker's part of each global batch from a step on, given the samples from there on.

    Where a batch cannot be shared evenly, which is in the last one alone, the first workers have a sample
    more; a part may be empty.
    """
    start = 0
    for step in range(first_step, length.steps_per_epoch):
        size = length.batch_size(step)
        each, more = divmod(size, world_size)
        first = start + rank * each + min(rank, more)
        yield order[first : first + each + (rank < more)]
        start += size
