"""What a loader hands to the loop, and the two promises that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")


class Batch(NamedTuple):
    """One worker's share of one global batch."""

    pixels: torch.Tensor
    """(N, C, H, W) uint8."""
    labels: torch.Tensor
    """(N,) int64."""
    ids: torch.Tensor
    """(N,) int64: the samples' row numbers in their split."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; from pinned memory without waiting for it."""
        return Batch(*(column.to(device, non_blocking=True) for column in self))


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


def share(samples: int, rank: int, world_size: int) -> int:
    """A worker's samples of a global batch; where it cannot be even, the first ones have one more."""
    return samples // world_size + (rank < samples % world_size)
