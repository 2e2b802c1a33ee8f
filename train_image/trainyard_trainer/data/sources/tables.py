"""Parquet files of images: picture files as bytes, or pixels as bytes, lists or tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.sources.image_files import check_columns
from trainyard_trainer.data.sources.samples import (
    ALL,
    ReadImages,
    SampleLocation,
    Source,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.errors import ConfigError, RunError

BATCH_ROWS = 1024
"""Rows in memory beside those that were asked for."""

SNIFFED_ROWS = 16
"""By so many of the first rows a column of bytes is taken for picture files or for pixels."""

OPENING_THREADS = 8

NO_IMAGE = "it has no image"


class TableFile(NamedTuple):
    """A Parquet file, its columns, and the rows at which its row groups end."""

    path: str
    size: int
    labels: pa.Array
    image_field: pa.Field
    class_names: tuple[str, ...] | None
    num_bytes: int
    group_rows: tuple[int, ...]


class PixelLayout(NamedTuple):
    """How pixels lie in a column."""

    stored: tuple[int, ...]
    """Sizes of the nested lists, of a tensor, or the length of flat values."""
    shape: tuple[int, int, int]
    is_channel_last: bool

    def to_images(self, values: np.ndarray) -> np.ndarray:
        """Flat values (N * C * H * W) -> (N, C, H, W)."""
        channels, height, width = self.shape
        if self.is_channel_last:
            return values.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
        return values.reshape(-1, channels, height, width)


def open_tables(
    path: str,
    filesystem: fs.FileSystem,
    root: str,
    files: Sequence[fs.FileInfo],
    image_column: str,
    label_column: str,
    say: Callable[[str], None],
) -> Source:
    """Raises ConfigError if a file is broken, or lacks a column, or has one of the wrong type."""
    with ThreadPoolExecutor(OPENING_THREADS) as pool:
        tables = list(
            pool.map(
                lambda info: _open_file(filesystem, info, image_column, label_column),
                sorted(files, key=lambda info: info.path),
            )
        )
    first = tables[0]
    for table in tables:
        _check_same(image_column, first, first.image_field.type, table, table.image_field.type)
        _check_same(label_column, first, first.labels.type, table, table.labels.type)
    layout = find_layout(filesystem, first.path, first.image_field)
    if layout and len(layout.stored) == 1:
        sizes = " x ".join(map(str, layout.shape))
        say(f"{path}: {image_column} is read as pixels, {sizes}: channels, rows, columns")
    return Source(
        path=path,
        kind=f"Parquet files of {'pixels' if layout else 'pictures'}",
        splits={
            name: TableSamples(filesystem, root, tuple(chosen), image_column, layout)
            for name, chosen in split_files(path, root, tables, say).items()
        },
        class_names=first.class_names,
        stamp=stamp_of([(table.path, table.size) for table in tables]),
    )


def _check_same(
    column: str,
    first: TableFile,
    first_type: pa.DataType,
    other: TableFile,
    other_type: pa.DataType,
) -> None:
    if first_type != other_type:
        raise ConfigError(
            f"column {column} is of type {first_type} in {first.path} and of type {other_type} in "
            f"{other.path}. Use files of one type."
        )


def _open_file(
    filesystem: fs.FileSystem, info: fs.FileInfo, image_column: str, label_column: str
) -> TableFile:
    try:
        with filesystem.open_input_file(info.path) as stream:
            file = pq.ParquetFile(stream)
            check_columns(info.path, file.schema_arrow.names, image_column, label_column)
            labels = file.read([label_column])[label_column]
            metadata = file.metadata
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{info.path} is no intact Parquet file: {error}") from error
    except OSError as error:
        raise RunError(f"{info.path} cannot be read: {error}") from error
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    return TableFile(
        path=info.path,
        size=info.size,
        labels=_to_labels(labels, info.path, label_column),
        image_field=file.schema_arrow.field(image_column),
        class_names=class_names_of(file.schema_arrow, label_column),
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


def _to_labels(column: pa.ChunkedArray, path: str, name: str) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_integer(kind):
        # A number that does not fit is out of range all the same.
        wide = column.cast(pa.int64(), safe=False)
        return _in_one(wide)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _in_one(column.cast(pa.large_string()))
    raise ConfigError(
        f"{path}: column {name} is of type {kind}, where integers from 0 or strings are right."
    )


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def class_names_of(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    """Names of the classes that Hugging Face's `datasets` writes beside their numbers."""
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
    """By the names of folders or of files: `train/0.parquet`, `data/train-00000-of-00002.parquet`."""
    named: dict[str, list[F]] = {}
    for table in tables:
        *folders, file = table.path.removeprefix(root).strip("/").split("/")
        words = [*folders, file.replace(".", "-").replace("_", "-").split("-")[0]]
        name = next((word for word in words if is_split_name(word)), "")
        named.setdefault(name, []).append(table)
    if len(tables) == 1 or "" in named:
        return {ALL: tables}
    return {split: named[name] for split, name in choose_splits(named, path, say).items()}


# What a column of images holds.


def find_layout(filesystem: fs.FileSystem, path: str, image_field: pa.Field) -> PixelLayout | None:
    """How the pixels lie in a file; None for picture files. Raises ConfigError for anything else."""
    column = image_field.name
    kind, tensor_shape = _storage(image_field)
    if _is_bytes(kind):
        return _sniff(filesystem, path, image_field)
    if not _is_list(kind):
        raise ConfigError(
            f"{path}: column {column} is of type {image_field.type}, where bytes (of "
            "picture files or of pixels), lists or tensors of integers, or {bytes, path} are right."
        )
    if tensor_shape is not None:
        return _layout_of(tensor_shape, path, column)
    first = next((value for value in _first_values(filesystem, path, image_field) if value), None)
    sizes = []
    while isinstance(first, list):
        sizes.append(len(first))
        first = first[0] if first else None
    return _layout_of(tuple(sizes), path, column)


def _storage(image_field: pa.Field) -> tuple[pa.DataType, tuple[int, ...] | None]:
    """The type that a column is stored as, and the shape of a tensor.

    Ray's tensors are lists with a note beside them, unless Ray is there and knows its own type.
    """
    kind = image_field.type
    if isinstance(kind, pa.BaseExtensionType):
        shape = getattr(kind, "shape", None)
        return _bytes_of_struct(kind.storage_type), tuple(shape) if shape else None
    note = image_field.metadata or {}
    if note.get(b"ARROW:extension:name", b"").startswith(b"ray.data.arrow_tensor"):
        return kind, tuple(json.loads(note[b"ARROW:extension:metadata"]))
    return _bytes_of_struct(kind), None


def _bytes_of_struct(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return kind.field("bytes").type
    return kind


def _is_bytes(kind: pa.DataType) -> bool:
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    """Lists of integers, nested or not."""
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        return False
    return _is_list(kind.value_type) or pa.types.is_integer(kind.value_type)


def _first_values(filesystem: fs.FileSystem, path: str, image_field: pa.Field) -> list:
    """The images of the first rows that have one, as Python values."""
    with filesystem.open_input_file(path) as stream:
        file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
        batches = file.iter_batches(batch_size=SNIFFED_ROWS, columns=[image_field.name])
        first = next(batches, None)
    if first is None:
        return []
    values = plain(first.column(0))
    return [value for value in values.to_pylist() if value is not None]


def plain(values: pa.Array) -> pa.Array:
    """Without extension and struct around the bytes or lists."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_struct(values.type):
        return pc.struct_field(values, "bytes")
    return values


def _sniff(filesystem: fs.FileSystem, path: str, image_field: pa.Field) -> PixelLayout | None:
    # torch comes with it, which nobody needs who has other columns.
    from trainyard_trainer.data.image_codec import UnreadableError, read_header

    values = _first_values(filesystem, path, image_field)
    for value in values:
        try:
            read_header(value)
        except UnreadableError:
            continue
        return None
    if not values:
        return None
    return _layout_of((len(values[0]),), path, image_field.name)


def _layout_of(stored: tuple[int, ...], path: str, column: str) -> PixelLayout:
    """Raises ConfigError for sizes that are no image."""
    if len(stored) == 1:
        for channels in (1, 3):
            side = math.isqrt(stored[0] // channels)
            if side and channels * side**2 == stored[0]:
                return PixelLayout(stored, (channels, side, side), is_channel_last=False)
    if len(stored) == 2 and all(stored):
        return PixelLayout(stored, (1, *stored), is_channel_last=False)
    if len(stored) == 3 and all(stored):
        if stored[2] in (1, 3):
            return PixelLayout(stored, (stored[2], *stored[:2]), is_channel_last=True)
        if stored[0] in (1, 3):
            return PixelLayout(stored, stored, is_channel_last=False)
    raise ConfigError(
        f"{path}: column {column} begins with values of {' x '.join(map(str, stored)) or 'nothing'}, "
        "which are no picture files and no pixels of 1 or 3 channels. Pixels are rows x columns, "
        "rows x columns x channels, channels x rows x columns, or as many as a square has."
    )


# Reading.


@dataclass(slots=True)
class TableSamples:
    """Rows of Parquet files."""

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
        found = pa.concat_arrays(list(self._pick(rows[order])))
        place_of = np.empty(len(rows), np.int64)
        place_of[order] = np.arange(len(rows))
        is_in_order = np.array_equal(order, np.arange(len(rows)))
        values = found if is_in_order else found.take(pa.array(place_of))
        if self.layout:
            return to_pixels(values, self.layout)
        images = values.to_pylist()
        problems = {place: NO_IMAGE for place, image in enumerate(images) if not image}
        return ReadImages(images, problems)

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
            try:
                self._batch = plain(next(self._batches).column(0))
            except pa.ArrowInvalid as error:
                raise ConfigError(f"{self._path} is no intact Parquet file: {error}") from error
            except OSError as error:
                raise RunError(f"{self._path} cannot be read: {error}") from error
        return self._batch

    def close(self) -> None:
        self._file.close()


def to_pixels(values: pa.Array, layout: PixelLayout) -> ReadImages:
    """Bytes or lists of integers as pixels, without a step per row where all is well."""
    images = np.zeros((len(values), *layout.shape), np.uint8)
    problems: dict[int, str] = {}
    places = np.arange(len(values))

    def leave_out(is_bad: np.ndarray, reason: str) -> pa.Array:
        nonlocal places
        problems.update(dict.fromkeys(places[is_bad].tolist(), reason))
        places = places[~is_bad]
        return values.filter(pa.array(~is_bad)) if is_bad.any() else values

    values = leave_out(_nulls(values), NO_IMAGE)
    sizes = " x ".join(map(str, layout.stored))
    values = leave_out(_wrong_sizes(values, layout.stored), f"it has not {sizes} values")
    numbers: np.ndarray = _flatten(values).reshape(len(values), math.prod(layout.stored))
    if numbers.dtype != np.uint8:
        is_out: np.ndarray = np.any((numbers < 0) | (numbers > 255), axis=1)
        values = leave_out(is_out, "it has pixels that are not from 0 to 255")
        numbers = numbers[~is_out].astype(np.uint8)
    images[places] = layout.to_images(numbers)
    return ReadImages(images, problems)


def _flatten(values: pa.Array) -> np.ndarray:
    """All numbers of an array without nulls, one after the other."""
    if len(values) == 0:
        return np.empty(0, np.uint8)
    if _is_bytes(values.type):
        joined = values.cast(pa.large_binary())
        _, offsets, data = joined.buffers()
        bounds = np.frombuffer(offsets, np.int64)[joined.offset : joined.offset + len(joined) + 1]
        return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    while _is_list(values.type):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False)


def _wrong_sizes(values: pa.Array, stored: tuple[int, ...]) -> np.ndarray:
    """(N,) bool of an array without nulls; nested lists are looked at level by level."""
    if _is_bytes(values.type):
        lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
        return lengths != stored[0]
    is_wrong = np.zeros(len(values), bool)
    row_of = np.arange(len(values))
    # A tensor's values are flat.
    for size in stored if _is_list(values.type.value_type) else (math.prod(stored),):
        lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
        is_wrong[row_of[lengths != size]] = True
        values = values.flatten()
        if _is_list(values.type) or values.null_count:
            row_of = np.repeat(row_of, np.maximum(lengths, 0))
    if values.null_count:
        is_wrong[row_of[_nulls(values)]] = True
    return is_wrong


def _nulls(values: pa.Array) -> np.ndarray:
    return pc.is_null(values).to_numpy(zero_copy_only=False)
