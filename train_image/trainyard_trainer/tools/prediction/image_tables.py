"""Tables of images for a prediction, read in groups of rows: the kinds of tables that `data.source` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainyard_trainer.config.data.section import MEMORY_GIB
from trainyard_trainer.data.sources.images.lance_images import first_images
from trainyard_trainer.data.sources.images.pixel_columns import (
    SNIFFED_ROWS,
    first_values,
    plain,
)
from trainyard_trainer.data.sources.lance_datasets import LanceTable
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.rows.held_memory import GIB, HeldMemory
from trainyard_trainer.data.sources.rows.readers import RowFormat, stored_values
from trainyard_trainer.data.sources.rows.row_source import FileRows, first_row, table_of
from trainyard_trainer.data.sources.rows.split_files import SourceFile, open_lance_table
from trainyard_trainer.data.sources.rows.stream_rows import GroupedRows


class ImageTable(Protocol):
    """An open table of images."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def group_rows(self) -> tuple[int, ...]:
        """The number of rows of each group."""

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table: ...

    def batches(self, groups: range, column: str, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield a column of several groups, at most so many rows at a time."""

    def first_values(self, field: pa.Field) -> list:
        """Return the first values of a column that are not null, as Python values."""


class ParquetImages:
    """An open Parquet file of images."""

    def __init__(self, file: SourceFile, opened: pq.ParquetFile) -> None:
        self._file = file
        self._opened = opened
        self.schema: pa.Schema = opened.schema_arrow

    @property
    def group_rows(self) -> tuple[int, ...]:
        metadata = self._opened.metadata
        return tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._opened.read_row_group(group, columns=list(columns))

    def batches(self, groups: range, column: str, rows: int) -> Iterator[pa.RecordBatch]:
        yield from self._opened.iter_batches(batch_size=rows, row_groups=groups, columns=[column])

    def first_values(self, field: pa.Field) -> list:
        return first_values(self._file.filesystem, self._file.path, field)


class LanceGroups:
    """An open data set of Lance with images."""

    def __init__(self, table: LanceTable) -> None:
        self._table = table
        self.schema: pa.Schema = table.schema

    @property
    def group_rows(self) -> tuple[int, ...]:
        return tuple(np.diff(self._table.group_ends, prepend=0).tolist())

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._table.read_group(group, columns)

    def batches(self, groups: range, column: str, rows: int) -> Iterator[pa.RecordBatch]:
        for group in groups:
            yield from self.read_group(group, [column]).to_batches(max_chunksize=rows)

    def first_values(self, field: pa.Field) -> list:
        return first_images(self._table, field.name)


class RowImages:
    """An open table that gives samples rather than columns of Arrow, such as a tar shard of WebDataset."""

    def __init__(self, rows: FileRows) -> None:
        self._rows = rows
        self.schema: pa.Schema = self._read(
            range(min(SNIFFED_ROWS, len(rows))), [*rows.columns]
        ).schema

    @property
    def group_rows(self) -> tuple[int, ...]:
        return tuple(np.diff(self._ends, prepend=0).tolist())

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of the row behind each group."""
        if isinstance(self._rows, GroupedRows):
            return self._rows.group_ends
        return np.array([len(self._rows)])

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._read(self._group(group), columns)

    def batches(self, groups: range, column: str, rows: int) -> Iterator[pa.RecordBatch]:
        for group in groups:
            whole = self._group(group)
            for first in range(whole.start, whole.stop, rows):
                part = range(first, min(first + rows, whole.stop))
                yield from self._read(part, [column]).combine_chunks().to_batches()

    def first_values(self, field: pa.Field) -> list:
        rows = range(min(SNIFFED_ROWS, len(self._rows)))
        return plain(self._read(rows, [field.name]).combine_chunks().column(0).chunk(0)).to_pylist()

    def _group(self, group: int) -> range:
        return range(first_row(self._ends, group), int(self._ends[group]))

    def _read(self, indices: range, columns: Sequence[str]) -> pa.Table:
        found = self._rows.read(indices, columns)
        return table_of({name: stored_values(values) for name, values in found.items()})


@contextmanager
def opened_table(file: SourceFile, form: RowFormat) -> Iterator[ImageTable]:
    """Open a table of images for a while. Raises ConfigError or RunError, which name it."""
    with explained_errors(file.shown, "--data", kind=f"{form.name} file"):
        match form.name:
            case "Parquet":
                with file.filesystem.open_input_file(file.path) as stream:
                    opened = pq.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
                    yield ParquetImages(file, opened)
            case "Lance":
                yield LanceGroups(open_lance_table(file))
            case _:
                yield RowImages(form.open(file, HeldMemory(MEMORY_GIB * GIB)))
