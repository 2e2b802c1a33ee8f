"""What the readers of all kinds of tables have in common, and how values become those of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.errors import DatasetError

Row = dict[str, Any]
"""The columns of one row: numbers, arrays, text or bytes."""

Values = np.ndarray | list[Any]
"""The values of a column: an array whose first axis has the N rows, or a list of N arrays, texts or bytes."""

Columns = dict[str, Values]
"""The values of N rows by column."""

Indices = Sequence[int] | np.ndarray
"""The numbers of N rows."""

ReadRows = Callable[[Indices], Columns]
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

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        """Read these columns of rows, in the order of the indices. Raises DatasetError or ConfigError."""


class FileRows(RowSource, Protocol):
    """The table of one file."""

    def first(self, count: int) -> pa.Table:
        """Return the first rows as they are stored, missing values included."""


def rows_of(columns: Columns) -> list[Row]:
    """Return the rows of columns, of which there is at least one."""
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


class TableRows:
    """A table in memory, or a group of rows of one. Columns of numbers are converted to arrays once."""

    def __init__(self, path: str, table: pa.Table, *, first: int = 0) -> None:
        """`path` is what messages call the source, and `first` the number of the table's first row there."""
        self._path = path
        self.table = table
        self._first = first
        self._arrays: dict[str, np.ndarray | None] = {}

    def read(self, rows: Indices, columns: Sequence[str]) -> Columns:
        """Return these columns of rows, given their numbers in this table."""
        places = np.asarray(rows, np.int64)
        return {name: self._values(name, places) for name in columns}

    def _values(self, name: str, rows: np.ndarray) -> Values:
        if name not in self._arrays:
            self._arrays[name] = self._array(name)
        array = self._arrays[name]
        if array is not None:
            found: np.ndarray = array[rows]
            return found
        taken = self.table.column(name).take(pa.array(rows))
        return values_of(taken, self._path, name, self._first + rows)

    def _array(self, name: str) -> np.ndarray | None:
        """Return a column as an array that takes no memory beside the table; None if there is none."""
        column = self.table.column(name)
        if column.num_chunks > 1 and _is_number(column.type):
            place = self.table.column_names.index(name)
            whole = pa.chunked_array([column.combine_chunks()])
            self.table = self.table.set_column(place, self.table.field(place), whole)
            column = whole
        return array_of(column) if column.num_chunks == 1 else None


def array_of(column: pa.ChunkedArray) -> np.ndarray | None:
    """Return a column of numbers, tensors or lists of one length as an array, a view where possible.

    None if the column is of another kind, lacks a value, or has lists of different lengths.
    """
    kind = column.type
    if column.null_count:
        return None
    if kinds.is_dictionary(kind):
        return array_of(column.cast(kind.value_type)) if _is_number(kind.value_type) else None
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: np.ndarray = column.combine_chunks().to_numpy_ndarray()
        return tensors
    if isinstance(kind, pa.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        return array_of(pa.chunked_array(storage, kind.storage_type))
    if _is_number(kind):
        numbers: np.ndarray = column.combine_chunks().to_numpy(zero_copy_only=False)
        return numbers
    return _array_of_lists(column.combine_chunks()) if _is_list(kind) and len(column) else None


def _array_of_lists(column: pa.Array) -> np.ndarray | None:
    sizes = []
    values = column
    while _is_list(values.type):
        lengths = pc.unique(pc.list_value_length(values))
        if len(lengths) != 1 or values.null_count:
            return None
        sizes.append(lengths[0].as_py())
        values = values.flatten()
    if values.null_count or not _is_number(values.type):
        return None
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
    return numbers.reshape(len(column), *sizes)


def values_of(column: pa.ChunkedArray, path: str, name: str, indices: Indices) -> Values:
    """Return the values of a column `name`, given the numbers of its rows in the source `path`.

    Raises DatasetError for a missing value, and for a type that no tensor, text or bytes can be made of.
    """
    array = array_of(column)
    if array is not None:
        return np.require(array, requirements="W")  # Arrow's memory may not be written to
    return _listed(column, f"{path}: column {name}", indices)


def _listed(column: pa.ChunkedArray, where: str, indices: Indices) -> list[Any]:
    """Return the values of a column that are no array together."""
    if column.null_count:
        missing = pc.index(column.is_null(), True).as_py()
        raise DatasetError(f"{where} has no value in row {indices[missing]}")
    kind = column.type
    if kinds.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        kind = column.type
    if _is_text(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return list(column.to_pylist())
    if _is_list(kind):
        return [
            _array_of(value, where, index) for value, index in zip(column, indices, strict=True)
        ]
    if kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        # An image or a sound as the library `datasets` stores it: its file's bytes, and its path.
        return _listed(pc.struct_field(column, "bytes"), f"{where}.bytes", indices)
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
    if not _is_number(values.type):
        raise DatasetError(f"{where} has lists of {values.type}; use lists of numbers")
    flat: np.ndarray = values.to_numpy(zero_copy_only=False)
    return flat.reshape(-1, *sizes).copy()


def _is_number(kind: pa.DataType) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def types_of(schema: pa.Schema, path: str) -> dict[str, str]:
    """Return the types of the columns by their names. Raises ConfigError for a name that is there twice."""
    repeated = [name for name in schema.names if schema.names.count(name) > 1]
    check_columns(path, schema.names, *repeated)
    return {field.name: str(field.type) for field in schema}


class ArrowRows:
    """A table that is in memory as a whole."""

    def __init__(self, path: str, table: pa.Table) -> None:
        self.path = path
        self.columns = types_of(table.schema, path)
        self._rows = TableRows(path, table)

    def __len__(self) -> int:
        return len(self._rows.table)

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        return self._rows.read(indices, columns)

    def first(self, count: int) -> pa.Table:
        return self._rows.table.slice(0, count)


class MappedRows:
    """A table in a file that is mapped into memory: its record batches are groups of rows."""

    def __init__(self, path: str, table: pa.Table) -> None:
        self.path = path
        self.columns = types_of(table.schema, path)
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        table = self._table.select(list(columns)).take(pa.array(indices, pa.int64()))
        return {name: values_of(table.column(name), self.path, name, indices) for name in columns}

    def first(self, count: int) -> pa.Table:
        return self._table.slice(0, count)

    @cached_property
    def group_ends(self) -> np.ndarray:
        return np.cumsum([len(batch) for batch in self._table.to_batches()] or [0])

    @property
    def group_bytes(self) -> np.ndarray:
        return np.array([batch.nbytes for batch in self._table.to_batches()], np.int64)

    def load_group(self, group: int, columns: tuple[str, ...]) -> ReadRows:
        """Return a reader of a record batch, which is in memory only as far as the system maps it."""
        first = first_row(self.group_ends, group)
        table = self._table.slice(first, int(self.group_ends[group]) - first)
        return partial(TableRows(self.path, table, first=first).read, columns=columns)


class ArrayRows:
    """NumPy arrays by name, whose first axis has the rows."""

    def __init__(self, path: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.path = path
        self.columns = {name: str(array.dtype) for name, array in arrays.items()}
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
        return {name: self._arrays[name][np.asarray(indices)] for name in columns}

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

    def read(self, indices: Indices, columns: Sequence[str]) -> Columns:
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
    indices: Indices, ends: np.ndarray, read: Callable[[int, np.ndarray], Columns]
) -> Columns:
    """Read rows of a table that consists of parts, each part once, in the order in which rows name them.

    `indices` has at least one row, and `ends` the number of the row behind each part. `read` reads rows of a
    part by their numbers in it.
    """
    wanted = np.asarray(indices, np.int64)
    owners, firsts, inverse = np.unique(
        np.searchsorted(ends, wanted, side="right"), return_index=True, return_inverse=True
    )
    turns = np.argsort(firsts)  # the parts in the order in which rows name them
    order = np.argsort(np.argsort(turns)[inverse], kind="stable")  # the rows, part by part
    bounds = [0, *np.cumsum(np.bincount(inverse)[turns]).tolist()]
    parts = [
        read(owner, wanted[order[start:end]] - first_row(ends, owner))
        for owner, start, end in zip(owners[turns].tolist(), bounds, bounds[1:], strict=False)
    ]
    if len(parts) == 1:
        return parts[0]
    is_sorted = np.array_equal(order, np.arange(len(order)))
    return {
        name: _joined([part[name] for part in parts], None if is_sorted else order)
        for name in parts[0]
    }


def _joined(parts: list[Values], order: np.ndarray | None) -> Values:
    """Join the values of parts of a table: the next value belongs to row `order[0]`, and so on."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({(each.dtype, each.shape[1:]) for each in arrays}) == 1:
        joined = np.concatenate(arrays)
        if order is None:
            return joined
        moved = np.empty_like(joined)
        moved[order] = joined
        return moved
    values = [value for part in parts for value in part]
    if order is None:
        return values
    rows = dict(zip(order.tolist(), values, strict=True))
    return [rows[row] for row in range(len(rows))]
