"""Read a table block by block: its files, its parts for training and validation, and their rows.

Rows are numbered in the order of the files' paths and of the rows within a file. Whether a row belongs to the
validation part follows from its number and the seed only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.config.data.sources import BUILT_IN
from trainyard_trainer.data.sources.column_types import without_views
from trainyard_trainer.data.sources.listing import SOURCE_KEYS
from trainyard_trainer.data.sources.parquet_files import opened
from trainyard_trainer.data.sources.partitions import Value
from trainyard_trainer.storage import open_filesystem

BLOCK_ROWS = 2**18
"""The largest number of rows of a block. One block is in memory in addition to a worker's share."""


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file. For a built-in data set, `path` is its name."""

    path: str
    rows: int
    size: int
    in_folders: tuple[tuple[str, Value], ...] = ()
    """The columns that are encoded in the names of the file's folders, with their values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The training rows or the validation rows of a table."""

    source: str
    files: tuple[File, ...]
    is_valid: bool
    share: float | None
    """The share of the files' rows for validation; None if all rows of the files belong to this part."""
    seed: int
    rows: int = 0

    def mask(self, first: int, count: int) -> np.ndarray:
        """Return a mask of the `count` rows from row `first` on that belong to this part: (count,) bool."""
        if self.share is None:
            return np.ones(count, bool)
        drawn = uniform(self.seed, np.arange(first, first + count)) < self.share
        return drawn if self.is_valid else ~drawn


class RowBlock(NamedTuple):
    """A block of consecutive rows of one file."""

    file: File
    first: int
    """The number of the first row among the rows of all files."""
    start: int
    """The number of the first row in its file."""
    table: pa.Table

    def where(self, row: int) -> str:
        """Return the path of the file and the number of a row in it, for an error message."""
        return f"{self.file.path}: row {self.start + row} (from 0)"


def read_blocks(part: Part, columns: Sequence[str], endpoint: str | None) -> Iterator[RowBlock]:
    """Yield the given columns of all rows of a part's files. Raises ConfigError for a damaged file."""
    filesystem = None
    if part.source not in BUILT_IN:
        filesystem, _ = open_filesystem(part.source, endpoint, names=SOURCE_KEYS)
    first = 0
    for file in part.files:
        start = 0
        for table in read_file(file, columns, filesystem):
            yield RowBlock(file, first + start, start, table)
            start += table.num_rows
        first += start


def read_file(
    file: File,
    columns: Sequence[str],
    filesystem: fs.FileSystem | None,
    row_groups: Sequence[int] | None = None,
) -> Iterator[pa.Table]:
    """Yield the given columns of a file, or of some of its row groups, block by block.

    If `filesystem` is None, the file is a built-in data set.
    """
    if filesystem is None:
        yield built_in_table(file.path).select(columns)
        return
    in_folders = dict(file.in_folders)
    stored = [column for column in columns if column not in in_folders]
    with opened(filesystem, file.path) as parquet:
        if not stored:
            for start in range(0, file.rows, BLOCK_ROWS):
                rows = min(BLOCK_ROWS, file.rows - start)
                yield pa.table({column: _repeated(in_folders[column], rows) for column in columns})
            return
        groups = range(parquet.num_row_groups) if row_groups is None else row_groups
        for batch in parquet.iter_batches(BLOCK_ROWS, row_groups=list(groups), columns=stored):
            table = pa.table(
                [without_views(column) for column in batch.columns], batch.schema.names
            )
            for column in columns:
                if column in in_folders:
                    table = table.append_column(
                        column, _repeated(in_folders[column], table.num_rows)
                    )
            yield table.select(columns)


def _repeated(value: Value, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), rows)


def built_in_table(name: str) -> pa.Table:
    """Return the table breast_cancer: 569 tumours with 30 measures each, malignant or benign."""
    # Imported here because the import of scikit-learn takes a second.
    from sklearn.datasets import load_breast_cancer

    assert name == "breast_cancer"
    found = load_breast_cancer()
    columns = {
        str(column).replace(" ", "_"): found.data[:, index]
        for index, column in enumerate(found.feature_names)
    }
    return pa.table(columns | {"diagnosis": found.target_names[found.target].astype(object)})


def uniform(seed: int, rows: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each row number, (N,) float64, as a function of it and the seed only.

    It applies the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) twice.
    """
    with np.errstate(over="ignore"):
        mixed = _mixed(np.array([seed], np.uint64)) + rows.astype(np.uint64)
        return (_mixed(mixed) >> np.uint64(11)) * 2.0**-53


def _mixed(numbers: np.ndarray) -> np.ndarray:
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
