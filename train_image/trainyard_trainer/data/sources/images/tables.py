"""Parquet files of images: image files as bytes, or pixels as bytes, lists or tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.sources.column_types import Use, require_use, to_labels
from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.images.pixel_columns import (
    NO_IMAGE,
    PixelLayout,
    find_layout,
    first_values,
    plain,
    to_pixels,
)
from trainyard_trainer.data.sources.images.samples import ImageSource, ReadImages, Source
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.parquet_files import opened
from trainyard_trainer.data.sources.partitions import Value, columns_in_folders
from trainyard_trainer.data.sources.parts import (
    ALL,
    SPLIT_COLUMN,
    SampleLocation,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.errors import ConfigError

BATCH_ROWS = 1024
"""The number of rows that are read at once from a row group."""

OPENING_THREADS = 8


class TableFile(NamedTuple):
    """A Parquet file, its columns, and the rows at which its row groups end."""

    path: str
    size: int
    labels: pa.Array
    image_field: pa.Field
    class_names: tuple[str, ...] | None
    num_bytes: int
    group_rows: tuple[int, ...]


def open_tables(source: ImageSource, files: Sequence[fs.FileInfo]) -> Source:
    """Open the Parquet files of a source of images. Files without rows are left out.

    Raises ConfigError if a file is damaged, if it lacks a column or has it twice, and if a column is of a
    wrong type.
    """
    ordered = sorted(files, key=lambda info: info.path)
    in_folders = columns_in_folders(source.root, [info.path for info in ordered])
    with ThreadPoolExecutor(OPENING_THREADS) as pool:
        opened_files = pool.map(partial(_open_file, source), ordered, in_folders)
        tables = [table for table in opened_files if sum(table.group_rows)]
    if not tables:
        raise ConfigError(f"{source.path} has no rows: its Parquet files are empty.")
    known = next(
        (table for table in tables if table.labels.null_count < len(table.labels)), tables[0]
    )
    tables = [
        table
        if table.labels.null_count < len(table.labels)
        else table._replace(labels=pa.nulls(len(table.labels), known.labels.type))
        for table in tables
    ]
    first = tables[0]
    for table in tables:
        check_same(
            source.columns.image, first, first.image_field.type, table, table.image_field.type
        )
        check_same(source.columns.label, first, first.labels.type, table, table.labels.type)
    layout = find_layout(
        first.path,
        first.image_field,
        lambda: first_values(source.filesystem, first.path, first.image_field),
    )
    if layout and len(layout.stored) == 1:
        source.tell_layout(layout.shape)
    named = split_files(source.path, source.root, tables, source.say)
    return Source(
        path=source.path,
        kind=f"Parquet files of {'pixels' if layout else 'pictures'}",
        splits={
            name: TableSamples(
                source.filesystem, source.root, tuple(chosen), source.columns.image, layout
            )
            for name, chosen in named.items()
        },
        class_names=first.class_names,
        stamp=stamp_of([(table.path, table.size) for table in tables]),
    )


def check_same(
    column: str,
    first: HasPath,
    first_type: pa.DataType,
    other: HasPath,
    other_type: pa.DataType,
) -> None:
    """Raise ConfigError if a column has different types in two files."""
    if first_type != other_type:
        raise ConfigError(
            f"column {column} is of type {first_type} in {first.path} and of type {other_type} in "
            f"{other.path}. Use files of one type."
        )


def _open_file(
    source: ImageSource, info: fs.FileInfo, in_folders: Mapping[str, Value]
) -> TableFile:
    image_column, label_column = source.columns
    with opened(source.filesystem, info.path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        names = schema.names
        given = [name for name in in_folders if name not in names]
        check_columns(info.path, [*names, *given], *source.columns)
        label_field = schema.field(label_column) if label_column in names else None
        if label_field is not None and metadata.num_rows:
            require_use(info.path, label_field, Use.IMAGE)
            column = file.read([label_column])[label_column]
        else:
            column = _repeated(in_folders.get(label_column), metadata.num_rows)
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    return TableFile(
        path=info.path,
        size=info.size,
        labels=in_one(to_labels(column, info.path, label_column)),
        image_field=schema.field(image_column),
        class_names=class_names_of(schema, label_column),
        num_bytes=sum(_image_bytes(group, image_column) for group in groups),
        group_rows=tuple(group.num_rows for group in groups),
    )


def _image_bytes(group: pq.RowGroupMetaData, image_column: str) -> int:
    columns = [group.column(index) for index in range(group.num_columns)]
    return sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.split(".")[0] == image_column
    )


def _repeated(value: Value, rows: int) -> pa.ChunkedArray:
    """Return the labels of a file whose folder's name has the label."""
    kind = pa.int64() if isinstance(value, int) else pa.string()
    text = value if value is None or isinstance(value, int) else str(value)
    return pa.chunked_array([pa.repeat(pa.scalar(text, kind), rows)])


def in_one(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def class_names_of(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    """Return the names of the classes that Hugging Face's `datasets` writes beside their numbers."""
    known = (schema.metadata or {}).get(b"huggingface")
    if known is None:
        return None
    feature = json.loads(known).get("info", {}).get("features", {}).get(label_column, {})
    names = feature.get("names") if isinstance(feature, dict) else None
    return tuple(names) if names else None


class HasPath(Protocol):
    @property
    def path(self) -> str: ...


F = TypeVar("F", bound=HasPath)


def split_files(
    path: str, root: str, tables: list[F], say: Callable[[str], None]
) -> dict[str, list[F]]:
    """Divide files by the names of folders or of files: `train/0.parquet`, `train-00000-of-00002.parquet`.

    A folder may be named `split=train` too. Raises ConfigError if only some files are named after a split.
    """
    named: dict[str, list[F]] = {}
    for table in tables:
        *folders, file = table.path.removeprefix(root).strip("/").split("/")
        words = [
            *(folder.removeprefix(f"{SPLIT_COLUMN}=") for folder in folders),
            file.replace(".", "-").replace("_", "-").split("-")[0],
        ]
        name = next((word for word in words if is_split_name(word)), "")
        named.setdefault(name, []).append(table)
    if len(tables) == 1 or set(named) == {""}:
        return {ALL: tables}
    if "" in named:
        splits = sorted(named.keys() - {""})
        raise ConfigError(
            f"{path} has files of the split {', '.join(splits)}, such as {named[splits[0]][0].path}, and "
            "files of no "
            f"split, such as {named[''][0].path}. Put each file into train/ or valid/, or name the files for "
            "training and those for validation apart (data.source, data.valid_source)."
        )
    return {split: named[name] for split, name in choose_splits(named, path, say).items()}


# Reading.


@dataclass(slots=True)
class TableSamples:
    """The samples of Parquet files. Rows in ascending order are read fastest."""

    filesystem: fs.FileSystem
    root: str
    tables: tuple[TableFile, ...]
    column: str
    layout: PixelLayout | None
    is_random_access: bool = False
    problems: dict[int, str] = field(default_factory=dict)
    labels: pa.Array = field(init=False)
    _ends: np.ndarray = field(init=False)
    _stream: _RowGroupReader | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.labels = pa.concat_arrays([table.labels for table in self.tables])
        self._ends = np.cumsum([len(table.labels) for table in self.tables])

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        return self.layout.shape if self.layout else None

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self.tables)

    def where(self, row: int) -> SampleLocation:
        number, start = self._find(row)
        path = self.tables[number].path
        return SampleLocation(path.removeprefix(f"{self.root}/"), row - start)

    def _find(self, row: int) -> tuple[int, int]:
        """Number of the file of a row, and the file's first row."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        return number, int(self._ends[number - 1]) if number else 0

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        order = np.argsort(rows, kind="stable")
        return in_given_order(pa.concat_arrays(list(self._pick(rows[order]))), order, self.layout)

    def _pick(self, rows: np.ndarray) -> Iterator[pa.Array]:
        """The images of ascending rows, a piece at a time."""
        done = 0
        while done < len(rows):
            stream = self._stream_to(int(rows[done]))
            start, values = stream.next_batch()
            end = int(np.searchsorted(rows, start + len(values)))
            yield values.take(pa.array(rows[done:end] - start))
            done = end

    def _stream_to(self, row: int) -> _RowGroupReader:
        """A stream whose next batch has the row. One that stands before it in the same row group goes on."""
        stream = self._stream
        if stream is None or not stream.start <= row < stream.end:
            if stream is not None:
                stream.close()
            number, first = self._find(row)
            stream = self._stream = _RowGroupReader.open(
                self.filesystem, self.tables[number], self.column, first, row
            )
        stream.skip_to(row)
        return stream


def in_given_order(found: pa.Array, order: np.ndarray, layout: PixelLayout | None) -> ReadImages:
    """Return images of ascending rows in the order in which they were asked for.

    Image i of `found` was asked for at place `order[i]`. Without a layout they are image files.
    """
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    is_in_order = np.array_equal(order, np.arange(len(order)))
    values = found if is_in_order else found.take(pa.array(place_of))
    if layout:
        return to_pixels(values, layout)
    images = values.to_pylist()
    problems = {place: NO_IMAGE for place, image in enumerate(images) if not image}
    return ReadImages(images, problems)


class _RowGroupReader:
    """One row group of a file, batch by batch: a group can be larger than memory."""

    def __init__(
        self,
        stream: pa.NativeFile,
        batches: Iterator[pa.RecordBatch],
        table: TableFile,
        start: int,
        end: int,
    ) -> None:
        self._file = stream
        self._batches = batches
        self._path = table.path
        self._batch: pa.Array | None = None
        self.start = start
        """Of the batch that comes next."""
        self.end = end
        """Of the row group."""

    @classmethod
    def open(
        cls, filesystem: fs.FileSystem, table: TableFile, column: str, first: int, row: int
    ) -> _RowGroupReader:
        ends = first + np.cumsum(table.group_rows)
        group = int(np.searchsorted(ends, row, side="right"))
        with explained_errors(table.path):
            stream = filesystem.open_input_file(table.path)
            file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
        batches = file.iter_batches(
            batch_size=BATCH_ROWS, row_groups=[group], columns=[column], use_threads=True
        )
        start = int(ends[group]) - table.group_rows[group]
        return cls(stream, batches, table, start, int(ends[group]))

    def skip_to(self, row: int) -> None:
        while row >= self.start + len(self._peek()):
            self.next_batch()

    def next_batch(self) -> tuple[int, pa.Array]:
        """Its first row, and its values."""
        values = self._peek()
        start = self.start
        self.start += len(values)
        self._batch = None
        return start, values

    def _peek(self) -> pa.Array:
        if self._batch is None:
            with explained_errors(self._path):
                self._batch = plain(next(self._batches).column(0))
        return self._batch

    def close(self) -> None:
        self._file.close()
