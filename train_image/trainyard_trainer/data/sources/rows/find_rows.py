"""Find the files of a table, and divide its rows into a split for training and one for validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from trainyard_trainer.config.data.section import MEMORY_GIB
from trainyard_trainer.config.data.streaming import why_not_streamed
from trainyard_trainer.data.sources.lance_datasets import LanceVersion
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.partitions import keys_of
from trainyard_trainer.data.sources.parts import SPLIT_COLUMN
from trainyard_trainer.data.sources.rows.held_memory import GIB, HeldMemory
from trainyard_trainer.data.sources.rows.readers import FORMATS, RowFormat
from trainyard_trainer.data.sources.rows.row_source import (
    Columns,
    FileRows,
    Indices,
    JoinedRows,
    Row,
    RowSource,
    rows_of,
)
from trainyard_trainer.data.sources.rows.split_files import SplitFiles, find_files
from trainyard_trainer.data.sources.rows.stream_rows import GroupedRows, StreamRows
from trainyard_trainer.errors import ConfigError

OPENING_THREADS = 8
"""The number of files that are opened at once: opening one is a request or two to an object store."""


@dataclass(frozen=True)
class TableSplit:
    """A split of a table: rows by their index, as PyTorch's map-style data sets have them."""

    rows: RowSource
    columns: tuple[str, ...]
    indices: np.ndarray
    """The numbers of its rows in the table."""
    group_rows: tuple[int, ...] = ()
    """The number of rows of each group, if the table is streamed: groups follow one another in `indices`."""
    largest_bytes: int = 0
    """The size of the largest of these groups, about."""
    versions: Mapping[str, LanceVersion] = field(default_factory=dict)
    """The version of each data set of Lance that the rows are of, by its address."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Indices) -> list[Row]:
        """Return several rows, as PyTorch's DataLoader asks for them."""
        return rows_of(self.read(indices))

    def read(self, indices: Indices) -> Columns:
        """Read several rows at once, given their numbers in the split."""
        return self.rows.read(self.indices[np.asarray(indices)], self.columns)


def open_table(
    *,
    split: str,
    source: str,
    endpoint: str | None,
    columns: Sequence[str] | None,
    valid_share: float,
    seed: int,
    valid_source: str | None = None,
    groups_at_once: int | None = None,
    memory_bytes: float = MEMORY_GIB * GIB,
    versions: Mapping[str, LanceVersion] | None = None,
) -> TableSplit:
    """Open a split of the table at a path. Raises ConfigError if there is no table.

    Files or folders named `train` and `valid` are the splits, or `source` and `valid_source` are. Without
    them `valid_share` of the rows is for validation, chosen by the seed. With `groups_at_once` the table is
    streamed, with so many groups of rows in memory, and whole groups are for validation. Otherwise the
    process holds at most `memory_bytes` of each split. Of a data set of Lance the version is read that
    `versions` have, as another split has found them.
    """
    if split == "valid" and valid_source is not None:
        source = valid_source
    found = find_files(source, endpoint, FORMATS, kind="table", versions=versions)
    if groups_at_once is not None:
        share = None if valid_source is not None else valid_share
        return _open_stream(split, source, found, columns, share, seed, groups_at_once)
    memory = HeldMemory(memory_bytes)
    if found.splits:
        rows = _open(source, found, found.splits["valid" if split == "valid" else "train"], memory)
        chosen: np.ndarray = np.arange(len(rows))
    else:
        rows = _open(source, found, found.files, memory, at_least=2)
        chosen = _of_split(split, len(rows), valid_share, seed)
    return TableSplit(rows, _require_columns(rows, columns), chosen, versions=found.versions)


def open_all_rows(
    source: str,
    endpoint: str | None,
    *,
    keys: tuple[str, str],
    columns: Sequence[str] | None,
    memory_bytes: float,
) -> TableSplit:
    """Open all rows of the table at a path, of whatever split. Raises ConfigError if there is no table.

    `keys` name the path and its endpoint in messages. Of `columns` those are read that the table has.
    """
    found = find_files(source, endpoint, FORMATS, kind="table", keys=keys, reads_tests=True)
    rows = _open(source, found, found.files, HeldMemory(memory_bytes), key=keys[0])
    known = tuple(name for name in columns or rows.columns if name in rows.columns)
    return TableSplit(rows, known, np.arange(len(rows)))


def _open_stream(
    split: str,
    source: str,
    found: SplitFiles,
    columns: Sequence[str] | None,
    valid_share: float | None,
    seed: int,
    groups_at_once: int,
) -> TableSplit:
    """Open a split of a table that is read group by group. Without `valid_share` the split is all of it."""
    if found.splits and valid_share is not None:
        files, valid_share = found.splits["valid" if split == "valid" else "train"], None
    else:
        files = found.files
    # A group of a stream is held by the stream, and no file as a whole.
    parts = [part for part in open_files(found, files, HeldMemory(math.inf)) if len(part)]
    grouped = [part for part in parts if isinstance(part, GroupedRows)]
    if len(grouped) < len(parts):
        why = why_not_streamed(files[0])
        raise ConfigError(f"data.source = {source} cannot be streamed: {why}")
    if not grouped:
        raise ConfigError(f"data.source = {source} has no rows")
    rows = StreamRows(source, grouped, groups_at_once)
    count = len(rows.group_rows)
    if valid_share is None:
        groups = np.arange(count)
    elif count > 1:
        groups = _of_split(split, count, valid_share, seed)
    else:
        raise ConfigError(
            f"data.source = {source} has a single group of rows, and data.stream keeps whole groups for "
            "validation. Write Parquet with row groups of a few thousand rows, name files or folders train "
            "and valid, or leave data.stream out."
        )
    sizes = rows.group_rows[groups]
    firsts = (np.cumsum(rows.group_rows) - rows.group_rows)[groups]
    indices = np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    return TableSplit(
        rows,
        _require_columns(rows, columns),
        indices,
        tuple(sizes.tolist()),
        rows.largest_bytes,
        found.versions,
    )


def _of_split(split: str, count: int, valid_share: float, seed: int) -> np.ndarray:
    """Return which of `count` rows or groups are in a split, in order. Each split has at least one."""
    held = min(max(1, round(valid_share * count)), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[:held] if split == "valid" else order[held:])


def _open(
    source: str,
    found: SplitFiles,
    files: Sequence[str],
    memory: HeldMemory,
    *,
    at_least: int = 1,
    key: str = "data.source",
) -> RowSource:
    """Open files of one kind with the same columns as one table."""
    parts = open_files(found, files, memory)
    rows = JoinedRows(source, parts) if len(parts) > 1 else parts[0]
    if len(rows) < at_least:
        raise ConfigError(f"{key} = {source} has {len(rows)} rows, and needs {at_least} or more")
    return rows


def open_files(found: SplitFiles, files: Sequence[str], memory: HeldMemory) -> list[FileRows]:
    """Open files of one kind, several at a time, with the memory for all of them.

    Raises ConfigError if their columns differ, and if the names of their folders hold columns.
    """
    form = found.form
    assert isinstance(form, RowFormat)
    for path in files:
        folders = path.removeprefix(found.root).strip("/").split("/")[:-1]
        if columns := keys_of(folders).keys() - {SPLIT_COLUMN}:
            raise ConfigError(
                f"{found.shown(path)} has the column {', '.join(sorted(columns))} in the names of its "
                "folders, which samples would lack. Write it into the files, or name the folder of one "
                "value in data.source."
            )

    def open_file(path: str) -> FileRows:
        shown = found.shown(path)
        with explained_errors(shown, kind=f"{form.name} file"):
            return form.open(found.file(path), memory)

    with ThreadPoolExecutor(OPENING_THREADS) as pool:
        parts = list(pool.map(open_file, files))
    first = parts[0]
    for part in parts:
        if part.columns != first.columns:
            raise ConfigError(
                f"{part.path} has the columns {_shown(part)}, and {first.path} has {_shown(first)}. All "
                "files of a table need the same columns with the same types."
            )
    return parts


def _shown(rows: RowSource) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in rows.columns.items())


def _require_columns(rows: RowSource, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns to read. Raises ConfigError for one that the table lacks."""
    if columns is None:
        return tuple(rows.columns)
    missing = [name for name in columns if name not in rows.columns]
    if missing:
        raise ConfigError(
            f"data.columns: {rows.path} has no column {missing[0]}, but {', '.join(rows.columns)}"
        )
    return tuple(columns)
