"""The readers of the kinds of tables: CSV, JSON lines, Parquet, Lance, NumPy, Arrow, tar shards."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, fs, parquet
from pyarrow import json as arrow_json

from trainyard_trainer.data.sources.column_types import without_views
from trainyard_trainer.data.sources.lance_datasets import SUFFIX
from trainyard_trainer.data.sources.rows.held_memory import HeldMemory, load_rows
from trainyard_trainer.data.sources.rows.row_source import (
    ArrayRows,
    ArrowRows,
    Columns,
    FileRows,
    Indices,
    MappedRows,
    ReadRows,
    Values,
    first_row,
    table_of,
    types_of,
)
from trainyard_trainer.data.sources.rows.split_files import (
    FileFormat,
    SourceFile,
    open_lance_table,
)
from trainyard_trainer.data.sources.text_header import read_header, require_utf8_text
from trainyard_trainer.errors import ConfigError, DatasetError

TAR_GROUP_BYTES = 2**23
"""The size of a group of neighbouring rows of a tar shard, about."""

HEADER_BYTES = 2**20
"""The largest size of the first line of a CSV file."""

END_BYTES = 1024
"""The zeros with which a tar file ends. Without them it is cut."""

Open = Callable[[SourceFile, HeldMemory], FileRows]
"""Opens a file. The other argument is the memory for all files of the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat(FileFormat):
    """A kind of file whose rows are read at random."""

    open: Open


def read_csv(file: SourceFile, memory: HeldMemory) -> FileRows:
    """Read a whole CSV or TSV file into memory."""
    shown = file.shown
    memory.hold(shown, file.size())
    header = read_header(_first_bytes(file).decode("utf-8-sig", "replace"), file.path)
    with file.filesystem.open_input_stream(file.path) as stream:
        table = csv.read_csv(
            stream,
            parse_options=csv.ParseOptions(delimiter=header.separator),
            read_options=csv.ReadOptions(skip_rows=1 if header.start else 0),
        )
    for field in table.schema:
        if pa.types.is_binary(field.type):  # what pyarrow makes of a column that is no UTF-8
            raise ConfigError(
                f"{shown}: column {field.name} is not UTF-8. Convert the file to UTF-8."
            )
    memory.hold(shown, table.nbytes)
    return ArrowRows(shown, table)


def read_json_lines(file: SourceFile, memory: HeldMemory) -> FileRows:
    """Read a whole file of JSON lines into memory."""
    memory.hold(file.shown, file.size())
    _first_bytes(file)
    with file.filesystem.open_input_stream(file.path) as stream:
        table = arrow_json.read_json(stream)
    memory.hold(file.shown, table.nbytes)
    return ArrowRows(file.shown, table)


def _first_bytes(file: SourceFile) -> bytes:
    """Return the beginning of a text file, with its first line. Raises ConfigError if it is not UTF-8."""
    with file.filesystem.open_input_stream(file.path) as stream:
        data: bytes = stream.read(HEADER_BYTES)
    require_utf8_text(file.shown, data)
    return data


class ParquetRows:
    """A Parquet file, of which a few row groups at a time are in memory."""

    def __init__(self, file: SourceFile, memory: HeldMemory) -> None:
        self.path = file.shown
        self._memory = memory
        self._file = file.filesystem.open_input_file(file.path)
        opened = parquet.ParquetFile(self._file)
        self.columns = types_of(opened.schema_arrow, self.path)
        self._metadata = metadata = opened.metadata
        groups = range(metadata.num_row_groups)
        self._ends = np.cumsum([metadata.row_group(each).num_rows for each in groups] or [0])
        memory.expect(int(self.group_bytes.sum()))

    def __len__(self) -> int:
        return int(self._metadata.num_rows)

    @property
    def group_ends(self) -> np.ndarray:
        return self._ends

    @property
    def group_bytes(self) -> np.ndarray:
        """The sizes of the row groups without compression, of all columns."""
        groups = range(self._metadata.num_row_groups)
        return np.array(
            [self._metadata.row_group(group).total_byte_size for group in groups], np.int64
        )

    def load_group(self, group: int, columns: tuple[str, ...]) -> ReadRows:
        """Read a row group into memory."""
        return partial(load_rows(self, group, columns).read, columns=columns)

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        return self._memory.read(self, indices, columns)

    def first(self, count: int) -> pa.Table:
        groups = range(int(np.searchsorted(self._ends, min(count, len(self)))) + 1)
        return self._read_groups([*groups][: len(self._ends)], [*self.columns]).slice(0, count)

    def _read_groups(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        # A reader keeps the bytes of the group that it has read last. With many files that would be much.
        reader = parquet.ParquetFile(self._file, metadata=self._metadata)
        table = reader.read_row_groups(groups, columns=list(columns))
        return pa.table([without_views(each) for each in table.columns], table.column_names)

    def read_group(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        return self._read_groups([group], columns)


class LanceRows:
    """A version of a data set of Lance, of which a few groups at a time are in memory."""

    def __init__(self, file: SourceFile, memory: HeldMemory) -> None:
        self.path = file.shown
        self._memory = memory
        self._table = open_lance_table(file)
        self.columns = types_of(self._table.schema, file.shown)
        memory.expect(int(self.group_bytes.sum()))

    def __len__(self) -> int:
        return self._table.num_rows

    @property
    def group_ends(self) -> np.ndarray:
        return self._table.group_ends

    @property
    def group_bytes(self) -> np.ndarray:
        return self._table.group_bytes

    def load_group(self, group: int, columns: tuple[str, ...]) -> ReadRows:
        """Read a fragment, or a part of one, into memory."""
        return partial(load_rows(self, group, columns).read, columns=columns)

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        return self._memory.read(self, indices, columns)

    def first(self, count: int) -> pa.Table:
        return self._table.first(count, [*self.columns])

    def read_group(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        return self._table.read_group(group, columns)


def read_numpy(file: SourceFile, memory: HeldMemory) -> FileRows:
    """Read the arrays of a .npz file, or the one of a .npy file, which is the column `x`."""
    path, shown = file.path, file.shown
    memory.hold(shown, file.size())
    with file.filesystem.open_input_stream(path) as stream:
        content = io.BytesIO(stream.read())
    try:
        found = np.load(content, allow_pickle=False)
        if path.endswith(".npz"):  # whose arrays are not read yet, and may be compressed
            memory.hold(shown, sum(each.file_size for each in found.zip.infolist()))
        arrays = (
            {name: found[name] for name in found.files} if path.endswith(".npz") else {"x": found}
        )
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{shown} holds no arrays that may be loaded: {error}") from None
    sizes = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    if not arrays or len({*sizes.values()}) > 1 or None in sizes.values():
        raise ConfigError(f"{shown} has arrays without a common number of rows: {sizes}")
    return ArrayRows(shown, arrays)


def read_arrow(file: SourceFile, memory: HeldMemory) -> FileRows:
    """Open an Arrow file or stream, as `datasets` saves it; on a local disk it is mapped into memory."""
    path, shown = file.path, file.shown
    local = isinstance(file.filesystem, fs.LocalFileSystem)
    if not local:
        memory.hold(shown, file.size())
    source = pa.memory_map(path) if local else file.filesystem.open_input_file(path)
    try:
        table = pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        table = pa.ipc.open_file(source).read_all()
    return MappedRows(shown, table) if local else ArrowRows(shown, table)


class TarRows:
    """A tar shard of WebDataset: the files of a row have the same name up to the first dot.

    The rest of a file's name is its column: `cls` and `json` hold numbers, `txt` text, `npy` an array, and
    others are bytes. An index of the places of all files is made when the shard is opened.
    """

    def __init__(self, file: SourceFile, memory: HeldMemory) -> None:
        """Make the index, which is small: rows are read from the file each time, so `memory` holds none."""
        self.path = shown = file.shown
        self._file = file.filesystem.open_input_file(file.path)
        self._rows: list[dict[str, tuple[int, int]]] = []
        last, end = None, 0
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as shard:
                for member in shard:
                    if not member.isfile():
                        continue
                    name = PurePosixPath(member.name)
                    key, _, column = name.name.partition(".")
                    if (name.parent, key) != last:
                        self._rows.append({})
                        last = name.parent, key
                    self._rows[-1][column] = member.offset_data, member.size
                    end = member.offset_data + member.size
        except tarfile.TarError as error:
            raise ConfigError(
                f"{shown} is no intact tar file without compression: {error}"
            ) from None
        if not self._rows:
            raise ConfigError(f"{shown} has no files")
        if self._file.size() < end + END_BYTES:
            raise ConfigError(f"{shown} is no intact tar file: its end is missing. Copy it again.")
        self.columns = {column: f".{column}" for column in sorted(self._rows[0])}

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def group_ends(self) -> np.ndarray:
        """The row behind each group: neighbouring rows whose files have about TAR_GROUP_BYTES together."""
        starts = np.array([_span(row)[0] for row in self._rows])
        last_of_group = np.flatnonzero(np.diff((starts - starts[0]) // TAR_GROUP_BYTES))
        return np.append(last_of_group + 1, len(starts))

    @property
    def group_bytes(self) -> np.ndarray:
        return np.array([end - start for start, end in self._spans], np.int64)

    def load_group(self, group: int, columns: tuple[str, ...]) -> ReadRows:
        """Read the files of a group of rows by one request."""
        first = first_row(self.group_ends, group)
        start, end = self._spans[group]
        self._file.seek(start)
        data = memoryview(self._file.read(end - start))

        def read_at(offset: int, size: int) -> bytes:
            return bytes(data[offset - start : offset - start + size])

        return lambda rows: {
            column: [self._value(first + row, column, read_at) for row in rows]
            for column in columns
        }

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Return where the files of each group begin and end."""
        ends = self.group_ends.tolist()
        return [
            (_span(self._rows[first])[0], _span(self._rows[end - 1])[1])
            for first, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        return {
            column: [self._value(index, column, self._read_at) for index in indices]
            for column in columns
        }

    def first(self, count: int) -> pa.Table:
        found = self.read(range(min(count, len(self))), [*self.columns])
        return table_of({name: stored_values(values) for name, values in found.items()})

    def _read_at(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        data: bytes = self._file.read(size)
        return data

    def _value(self, index: int, column: str, read_at: Callable[[int, int], bytes]) -> Any:
        place = self._rows[index].get(column)
        if place is None:
            raise DatasetError(f"{self.path}: row {index} has no file that ends in .{column}")
        data = read_at(*place)
        try:
            match column.rpartition(".")[2]:
                case "cls":
                    return int(data)
                case "txt" | "text":
                    return data.decode()
                case "json":
                    return json.loads(data)
                case "npy":
                    return np.load(io.BytesIO(data), allow_pickle=False)
                case _:
                    return data
        except ValueError as error:
            raise DatasetError(
                f"{self.path}: the file .{column} of row {index} cannot be read: {error}"
            ) from None


def stored_values(values: Values) -> Values:
    """Return the values of a column as Arrow stores them: arrays of one shape stacked, others as lists."""
    if isinstance(values, np.ndarray):
        return values
    if all(isinstance(value, np.ndarray) for value in values):
        if len({value.shape for value in values}) == 1:
            return np.stack(values)
        return [value.tolist() for value in values]
    return values


def _span(row: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return where the files of a row of a tar shard begin and end."""
    places = row.values()
    return min(offset for offset, _ in places), max(offset + size for offset, size in places)


FORMATS: tuple[RowFormat, ...] = (
    RowFormat(
        name="CSV",
        description="a CSV or TSV file with a header, which is held in memory",
        suffixes=(".csv", ".tsv"),
        open=read_csv,
    ),
    RowFormat(
        name="JSON lines",
        description="a file with a JSON object in each line, which is held in memory",
        suffixes=(".jsonl", ".ndjson"),
        open=read_json_lines,
    ),
    RowFormat(
        name="Parquet",
        description="a Parquet file, of which a few row groups are held in memory",
        suffixes=(".parquet",),
        open=ParquetRows,
    ),
    RowFormat(
        name="Lance",
        description="a data set of Lance, which is a folder, of which a few fragments are held in memory",
        suffixes=(SUFFIX,),
        open=LanceRows,
    ),
    RowFormat(
        name="NumPy",
        description="a `.npz` file with arrays of the same number of rows, or a `.npy` file",
        suffixes=(".npz", ".npy"),
        open=read_numpy,
    ),
    RowFormat(
        name="Arrow",
        description="an Arrow file, as `save_to_disk` of the library `datasets` writes it",
        suffixes=(".arrow",),
        open=read_arrow,
    ),
    RowFormat(
        name="WebDataset",
        description="tar shards in which the files of a row have the same name up to the first dot",
        suffixes=(".tar",),
        open=TarRows,
    ),
)
"""The kinds of files, by whose suffix they are recognised."""
