"""The interface of loaders, and the division of a global batch among workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trainyard_trainer.run_folder.measurements.progress import Length


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some samples of a data set, such as one worker's share of a global batch.

    `batch["name"]` is a column, and `len(batch)` the number of samples.
    """

    columns: Mapping[str, torch.Tensor]
    """The columns of the data set by name; the first axis of each tensor has the N samples."""
    ids: torch.Tensor
    """(N,) int64: the samples' row numbers in their split."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, end: int) -> Batch:
        """Return the samples from `start` up to, but without, `end`."""
        columns = {name: column[start:end] for name, column in self.columns.items()}
        return Batch(columns, self.ids[start:end])

    def replace(self, **columns: torch.Tensor) -> Batch:
        """Return the same samples with these columns instead of, or beside, those that they have."""
        return Batch({**self.columns, **columns}, self.ids)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on the device; the copy from pinned memory is asynchronous."""
        columns = {name: each.to(device, non_blocking=True) for name, each in self.columns.items()}
        return Batch(columns, self.ids.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; PyTorch's DataLoader calls this method."""
        columns = {name: column.pin_memory() for name, column in self.columns.items()}
        return Batch(columns, self.ids.pin_memory())

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Concatenate batches of the same columns along the axis of the samples."""
        if len(parts) == 1:
            return parts[0]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Batch(columns, torch.cat([part.ids for part in parts]))


class BatchRequest(NamedTuple):
    """The samples of a batch that a loader asks a split for."""

    indices: np.ndarray
    """(N,) int64: the samples' row numbers in their split."""
    epoch: int
    """The epoch, counted from 0, on which random changes of the samples may depend."""


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
