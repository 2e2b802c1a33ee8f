"""The order in which a stream visits its samples: a few groups of rows at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.data.sources.rows.find_rows import TableSplit
from trainyard_trainer.data.sources.rows.split_files import SplitName


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOrder:
    """The order of the training samples of a data set whose rows are read in groups.

    The groups of an epoch are shuffled and divided into windows of `groups_at_once`. The samples of a window
    are shuffled so that each batch has about the same share of each of its groups. Within a batch, samples
    of the same group are neighbours, so each worker reads only its part of the groups.
    """

    group_rows: tuple[int, ...]
    """The number of training samples of each group, in the order of the source."""
    groups_at_once: int
    """The number of groups of a window."""
    largest_bytes: int
    """The size of the largest group in memory, about."""

    @classmethod
    def of_table(cls, train: TableSplit, groups_at_once: int) -> StreamOrder:
        """Return the order of a streamed table's training samples."""
        return cls(
            group_rows=train.group_rows,
            groups_at_once=groups_at_once,
            largest_bytes=train.largest_bytes,
        )

    def describe(self) -> str:
        """Return a line about what is read at once, for the log."""
        size = self.largest_bytes / 2**20
        return (
            f"stream: {len(self.group_rows):,} groups of up to {max(self.group_rows):,} rows and {size:,.1f} "
            f"MiB; {self.groups_at_once} of them are shuffled together, and held by each process that reads"
        )

    def of_epoch(self, epoch: int, *, seed: int, batch_size: int) -> np.ndarray:
        """Return the indices of all samples, (N,) int64: they depend on the arguments alone."""
        random = np.random.default_rng([seed, epoch])
        groups = random.permutation(len(self.group_rows))
        windows = np.split(groups, range(self.groups_at_once, len(groups), self.groups_at_once))
        samples, visits = zip(*self._mixed(windows, random), strict=True)
        order = np.concatenate(samples)
        batches = np.arange(len(order)) // batch_size
        return order[np.lexsort((np.concatenate(visits), batches))]

    def _mixed(
        self, windows: list[np.ndarray], random: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the shuffled samples of each window, and for each sample how many groups come before its own.

        The shuffled samples of a group are spread evenly over the window, each at a random place of its part.
        """
        sizes = np.asarray(self.group_rows)
        starts = np.cumsum(sizes) - sizes
        before = 0
        for window in windows:
            rows = [starts[group] + random.permutation(sizes[group]) for group in window]
            places = [(np.arange(size) + random.random(size)) / size for size in sizes[window]]
            mixed = np.argsort(np.concatenate(places), kind="stable")
            visits = before + np.repeat(np.arange(len(window)), sizes[window])
            yield np.concatenate(rows)[mixed], visits[mixed]
            before += len(window)


class Stream(ABC):
    """A data set that is read from its source while a run trains, without a preparation."""

    __slots__ = ()

    info: DatasetInfo
    order: StreamOrder
    """The order of the training samples."""
    num_train: int
    num_valid: int
    bad_samples: int

    @abstractmethod
    def open_rows(self, split: SplitName) -> Dataset[Batch]:
        """Return a split, whose items are whole batches; its files are opened where it is used."""
