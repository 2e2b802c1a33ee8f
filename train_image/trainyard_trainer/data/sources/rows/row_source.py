"""What the readers of all kinds of tables have in common, and how values become those of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from trainyard_trainer.errors import DatasetError

Row = dict[str, Any]
"""The columns of one row: numbers, arrays, text or bytes."""

ReadRows = Callable[[list[int]], list[Row]]
"""Returns rows of a group of rows by their numbers in the group."""


class RowSource(Protocol):
    """A table whose rows are read at random."""

    @property
    def path(self) -> str:
        """What error messages call it."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The type of each column, as messages show it."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """Read these columns of rows, in the order of the indices. Raises DatasetError or ConfigError."""


class FileRows(RowSource, Protocol):
    """The table of one file."""

    def first(self, count: int) -> pa.Table:
        """Return the first rows as they are stored, missing values included."""


def rows_of(table: pa.Table, indices: Sequence[int], path: str) -> list[Row]:
    """Convert the rows of a small table into samples. `indices` are their numbers in the source `path`.

    Raises DatasetError for a missing value, and for a type that no tensor, text or bytes can be made of.
    """
    values = {
        name: _values_of(table.column(name), f"{path}: column {name}", indices)
        for name in table.column_names
    }
    return [{name: column[row] for name, column in values.items()} for row in range(len(table))]


def _values_of(column: pa.ChunkedArray, where: str, indices: Sequence[int]) -> Sequence[Any]:
    """Return the values of a column, one for each row."""
    if column.null_count:
        missing = pc.index(column.is_null(), True).as_py()
        raise DatasetError(f"{where} has no value in row {indices[missing]}")
    kind = column.type
    if kinds.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: Sequence[Any] = column.combine_chunks().to_numpy_ndarray()
        return tensors
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        kind = column.type
    if kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind):
        numbers: Sequence[Any] = column.to_numpy()
        return numbers
    if _is_text(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return list(column.to_pylist())
    if _is_list(kind):
        return [
            _array_of(value, where, index) for value, index in zip(column, indices, strict=True)
        ]
    if kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        # An image or a sound as the library `datasets` stores it: its file's bytes, and its path.
        return _values_of(pc.struct_field(column, "bytes"), f"{where}.bytes", indices)
    raise DatasetError(
        f"{where} has the type {kind}, of which no tensor can be made: use numbers, booleans, text, bytes or "
        "lists of numbers, or choose other columns with data.columns"
    )


def _array_of(value: pa.Scalar, where: str, index: int) -> np.ndarray:
    """Return a list of numbers, or of lists of equal length, as an array."""
    sizes = []
    values = value.values
    while _is_list(values.type):
        lengths = {*pc.list_value_length(values).to_pylist()}
        if len(lengths) > 1:
            raise DatasetError(f"{where} has lists of different lengths in row {index}")
        sizes.append(lengths.pop() if lengths else 0)
        values = values.flatten()
    if values.null_count:
        raise DatasetError(f"{where} has a list with a missing value in row {index}")
    if not (
        kinds.is_integer(values.type)
        or kinds.is_floating(values.type)
        or kinds.is_boolean(values.type)
    ):
        raise DatasetError(f"{where} has lists of {values.type}; use lists of numbers")
    flat: np.ndarray = values.to_numpy(zero_copy_only=False)
    return flat.reshape(-1, *sizes).copy()


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def types_of(schema: pa.Schema) -> dict[str, str]:
    """Return the types of the columns by their names."""
    return {field.name: str(field.type) for field in schema}


class ArrowRows:
    """A table in memory, or in a file that is mapped into memory."""

    def __init__(self, path: str, table: pa.Table) -> None:
        self.path = path
        self.columns = types_of(table.schema)
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def read(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        table = self._table.select(list(columns)).take(pa.array(indices, pa.int64()))
        return rows_of(table, indices, self.path)

    def first(self, count: int) -> pa.Table:
        return self._table.slice(0, count)


class MappedRows(ArrowRows):
    """A table in a file that is mapped into memory: its record batches are groups of rows."""

    @cached_property
    def group_ends(self) -> np.ndarray:
        return np.cumsum([len(batch) for batch in self._table.to_batches()] or [0])

    @property
    def group_bytes(self) -> np.ndarray:
        return np.array([batch.nbytes for batch in self._table.to_batches()], np.int64)

    def load_group(self, group: int, columns: tuple[str, ...]) -> ReadRows:
        """Return a reader of a record batch, which is in memory only as far as the system maps it."""
        first = first_row(self.group_ends, group)
        return lambda rows: self.read([first + row for row in rows], columns)


class ArrayRows:
    """NumPy arrays by name, whose first axis has the rows."""

    def __init__(self, path: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.path = path
        self.columns = {name: str(array.dtype) for name, array in arrays.items()}
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def read(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        parts = {name: self._arrays[name][np.asarray(indices)] for name in columns}
        return [{name: part[row] for name, part in parts.items()} for row in range(len(indices))]

    def first(self, count: int) -> pa.Table:
        return table_of({name: array[:count] for name, array in self._arrays.items()})


class JoinedRows:
    """Several sources with the same columns, one after the other."""

    def __init__(self, path: str, parts: Sequence[RowSource]) -> None:
        self.path = path
        self.columns = parts[0].columns
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        return read_parts(
            indices, self._ends, lambda part, rows: self._parts[part].read(rows, columns)
        )


def table_of(columns: Mapping[str, np.ndarray | Sequence[Any]]) -> pa.Table:
    """Return arrays as a table; those of several axes become columns of tensors."""

    def column_of(values: np.ndarray | Sequence[Any]) -> pa.Array:
        if isinstance(values, np.ndarray) and values.ndim > 1 and values.size:
            return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))
        return pa.array(values)

    return pa.table({name: column_of(values) for name, values in columns.items()})


def first_row(ends: np.ndarray, part: int) -> int:
    """Return the number of the first row of a part; `ends` has the number of the row behind each part."""
    return int(ends[part - 1]) if part else 0


def read_parts(
    indices: Sequence[int], ends: np.ndarray, read: Callable[[int, list[int]], list[Row]]
) -> list[Row]:
    """Read rows of a table that consists of parts, each part once, in the order in which rows name them.

    `ends` has the number of the row behind each part. `read` reads rows of a part by their numbers in it.
    """
    wanted = np.asarray(indices)
    owners = np.searchsorted(ends, wanted, side="right")
    rows: list[Row] = [{}] * len(wanted)
    _, firsts = np.unique(owners, return_index=True)
    for owner in owners[np.sort(firsts)].tolist():
        places = np.flatnonzero(owners == owner)
        first = first_row(ends, owner)
        for place, row in zip(places, read(owner, (wanted[places] - first).tolist()), strict=True):
            rows[place] = row
    return rows
