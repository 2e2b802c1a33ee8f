"""The interface of loaders, and the division of a global batch among workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trainyard_trainer.run_folder.progress import Length


class Batch(NamedTuple):
    """One worker's share of one global batch."""

    pixels: torch.Tensor
    """(N, C, H, W) uint8; for text (N, 1, 1, bytes)."""
    labels: torch.Tensor
    """(N,) int64."""
    ids: torch.Tensor
    """(N,) int64: the samples' row numbers in their split."""


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device; the copy from pinned memory is asynchronous."""
    return Batch(*(column.to(device, non_blocking=True) for column in batch))


class Batches(Protocol):
    """Training batches of one worker, from the position at which the run resumes.

    All workers get the same number of batches in an epoch, and each sample goes to at most one of them per
    epoch, also if the epoch was started with another number of workers.
    """

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, counted from 0; in a resumed epoch over those that remain."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs, beside the number of samples, to go on after the last batch.

        It may communicate, so all workers have to call it at the same step.
        """


def order_of_epoch(num_samples: int, epoch: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """Return the indices of all samples in an order that depends on seed and epoch alone, (N,) int64."""
    if not shuffle:
        return np.arange(num_samples)
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def parts_of_epoch(
    order: np.ndarray, length: Length, first_step: int, rank: int, world_size: int
) -> Iterator[np.ndarray]:
    """Iterate over a worker's part of each global batch from a step on; `order` begins with that step.

    If the last batch cannot be divided evenly, the first workers get one sample more; a part may be empty.
    """
    start = 0
    for step in range(first_step, length.steps_per_epoch):
        size = length.batch_size(step)
        each, more = divmod(size, world_size)
        first = start + rank * each + min(rank, more)
        yield order[first : first + each + (rank < more)]
        start += size
