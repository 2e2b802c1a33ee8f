"""A table that is read group by group, such as the row groups of Parquet, with a bounded number in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.rows.row_source import (
    Columns,
    Indices,
    ReadRows,
    RowSource,
    read_parts,
)
from trainyard_trainer.errors import ConfigError

LARGEST_GROUP = 2**30
"""The largest size of a group in memory, in bytes."""


@runtime_checkable
class GroupedRows(RowSource, Protocol):
    """A file whose rows are read in groups: each group by one request, and in any order."""

    @property
    def group_ends(self) -> np.ndarray:
        """The number of the row behind each group."""

    @property
    def group_bytes(self) -> np.ndarray:
        """The size of each group in memory, about, in bytes."""

    def load_group(self, group: int, columns: tuple[str, ...]) -> ReadRows:
        """Read a group into memory."""


class StreamRows:
    """Files with the same columns, of whose groups at most `groups_at_once` are in memory."""

    def __init__(self, path: str, parts: Sequence[GroupedRows], groups_at_once: int) -> None:
        self.path = path
        self.columns: Mapping[str, str] = parts[0].columns
        self.groups_at_once = groups_at_once
        self.group_rows = np.concatenate([np.diff(part.group_ends, prepend=0) for part in parts])
        self._ends = np.cumsum(self.group_rows)
        self._groups = [(part, group) for part in parts for group in range(len(part.group_ends))]
        self._loaded: OrderedDict[tuple[int, tuple[str, ...]], ReadRows] = OrderedDict()
        self.largest_bytes = _largest_bytes(parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        """Read rows. Each group among them is loaded once, in the order in which the rows name them."""
        names = tuple(columns)
        return read_parts(indices, self._ends, lambda group, rows: self._load(group, names)(rows))

    def _load(self, index: int, columns: tuple[str, ...]) -> ReadRows:
        key = (index, columns)
        if key not in self._loaded:
            while len(self._loaded) >= self.groups_at_once:
                self._loaded.popitem(last=False)
            part, group = self._groups[index]
            with explained_errors(part.path, kind="file"):
                self._loaded[key] = part.load_group(group, columns)
        self._loaded.move_to_end(key)
        return self._loaded[key]


def _largest_bytes(parts: Sequence[GroupedRows]) -> int:
    """Return the size of the largest group. Raises ConfigError if it is too large to hold several."""
    largest = 0
    for part in parts:
        found = int(part.group_bytes.max(initial=0))
        if found > LARGEST_GROUP:
            raise ConfigError(
                f"{part.path} has a row group of {found / 2**30:.1f} GiB, and data.stream holds several in "
                f"memory: {LARGEST_GROUP / 2**30:.0f} GiB is the most. Write it again with smaller row "
                "groups, of a few thousand rows."
            )
        largest = max(largest, found)
    return largest
