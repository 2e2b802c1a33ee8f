"""The memory of a process for the rows of a table: whole files, and row groups that are read again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from trainyard_trainer.data.sources.rows.row_source import (
    Columns,
    Indices,
    TableRows,
    first_row,
    read_parts,
)
from trainyard_trainer.errors import ConfigError

GIB = 2**30

ALLOCATED_PER_FILLED = 2
"""Arrow's readers double a buffer that is full, so they allocate up to twice the bytes they fill."""

LARGEST_COLUMN = 2**31
"""The size in bytes of a column that stays in pieces: Arrow counts the bytes of text with 32 bits."""

Group = tuple[str, int | None, tuple[str, ...]]
"""The file of a row group, its number in the file (None for all groups together), and the columns."""


class GroupedFile(Protocol):
    """A file whose rows are read in groups."""

    @property
    def path(self) -> str:
        """What error messages call it."""

    @property
    def group_ends(self) -> np.ndarray:
        """The number of the row behind each group."""

    def read_group(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of a group into memory."""


def load_rows(file: GroupedFile, group: int, columns: tuple[str, ...]) -> TableRows:
    """Read columns of a group of rows into memory."""
    table = file.read_group(group, columns)
    return TableRows(file.path, table, first=first_row(file.group_ends, group))


class HeldMemory:
    """What a process holds of a table, up to a number of bytes."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._grouped_bytes = 0
        self._groups: OrderedDict[Group, tuple[TableRows, int]] = OrderedDict()

    def hold(self, path: str, num_bytes: int) -> None:
        """Count a file that is read as a whole, before or after it is read.

        Raises ConfigError if all of these files have more bytes than the process may hold.
        """
        with self._lock:
            self._files[path] = max(num_bytes, self._files.get(path, 0))
            total = sum(self._files.values())
        if total > self.limit_bytes:
            raise ConfigError(
                f"{path} is read as a whole, and the files of its table take {total / GIB:.3g} GiB or more "
                f"in each process that reads samples: data.memory_gib allows "
                f"{self.limit_bytes / GIB:.3g}.\n"
                "       Write the table as Parquet, of which a part is held, or raise data.memory_gib."
            )

    def expect(self, num_bytes: int) -> None:
        """Count a file that is read in groups, with the bytes of all of them."""
        with self._lock:
            self._grouped_bytes += ALLOCATED_PER_FILLED * num_bytes

    def read(self, file: GroupedFile, indices: Indices, columns: Sequence[str]) -> Columns:
        """Read rows of a file. The groups that were used last are held, or all groups as one table."""
        names = tuple(columns)
        if whole := self._whole(file, names):
            return whole.read(indices, names)
        return read_parts(
            indices,
            file.group_ends,
            lambda group, rows: self._group(file, group, names).read(rows, names),
        )

    def _whole(self, file: GroupedFile, columns: tuple[str, ...]) -> TableRows | None:
        """Return a file as one table, whose rows are read faster; None unless there is memory for all files.

        Its groups are joined as soon as each of them has been read.
        """
        if self._grouped_bytes + sum(self._files.values()) > self.limit_bytes:
            return None
        key = (file.path, None, columns)
        if key not in self._groups:
            groups = range(len(file.group_ends))
            if not all((file.path, group, columns) in self._groups for group in groups):
                return None
            held = [self._groups.pop((file.path, group, columns)) for group in groups]
            size = sum(size for _, size in held)
            tables = [rows.table for rows, _ in held]
            del held  # so that each column is freed when it is joined
            self._groups[key] = TableRows(file.path, _joined(tables)), size
        self._groups.move_to_end(key)
        return self._groups[key][0]

    def _group(self, file: GroupedFile, group: int, columns: tuple[str, ...]) -> TableRows:
        """Return a row group, which is read unless it is held. Those that were used last stay."""
        key = (file.path, group, columns)
        if key not in self._groups:
            rows = load_rows(file, group, columns)
            self._groups[key] = rows, ALLOCATED_PER_FILLED * rows.table.get_total_buffer_size()
            while len(self._groups) > 1 and sum(self.sizes) > self.limit_bytes:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key][0]

    @property
    def sizes(self) -> list[int]:
        """The bytes that each held row group may take, the one that was used last at the end."""
        return [size for _, size in self._groups.values()]


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Join the tables one column after the other, and empty the list: only one column is in memory twice."""
    columns = {}
    for field in tables[0].schema:
        chunks = [chunk for table in tables for chunk in table.column(field.name).chunks]
        tables[:] = [table.drop_columns([field.name]) for table in tables]
        column = pa.chunked_array(chunks, field.type)
        del chunks
        columns[field.name] = column if column.nbytes >= LARGEST_COLUMN else column.combine_chunks()
    return pa.table(columns)
