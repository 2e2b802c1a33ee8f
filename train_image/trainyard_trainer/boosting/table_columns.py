"""The feature columns of a table: select them, and check that every file has them with usable values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.boosting.table_files import File, Part, built_in_table, read_file
from trainyard_trainer.config.data.section import Table
from trainyard_trainer.config.data.sources import BUILT_IN
from trainyard_trainer.data.sources.column_types import (
    EXACT_INTEGER,
    LARGEST_FLOAT,
    LARGEST_INTEGER,
    Use,
    first_unusable,
    label_type,
    require_use,
    type_of,
)
from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.listing import SOURCE_KEYS
from trainyard_trainer.data.sources.parquet_files import index_columns, opened
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

SHOWN = 5
"""The largest number of columns that an error message lists."""

COLUMNS = "Set data.label_column and data.feature_columns."

Say = Callable[[str], None]


def choose_columns(
    parts: Iterable[Part], data: Table, use: Use, endpoint: str | None, say: Say
) -> tuple[str, ...]:
    """Check the feature and label columns of all files, and return the names of the feature columns.

    `use` is the use of the label. Raises ConfigError if a column is missing or duplicated, if its type
    differs between files or cannot be used for training, and if a feature is infinite or too large.
    """
    choice = _Columns(data, use, say)
    seen: set[str] = set()
    for part in parts:
        filesystem = None
        if part.source not in BUILT_IN:
            filesystem, _ = open_filesystem(part.source, endpoint, names=SOURCE_KEYS)
        for file in part.files:
            if file.path not in seen:
                seen.add(file.path)
                choice.add(file, filesystem)
    return choice.columns()


class _Columns:
    """The feature columns that the files checked so far have in common."""

    def __init__(self, data: Table, use: Use, say: Say) -> None:
        self._data = data
        self._use = use
        self._say = say
        self._chosen = data.feature_columns
        self._first = ""
        """The path of the first file that was checked."""
        self._label: tuple[pa.DataType, str] | None = None
        """The type of the labels, and the path of the first file that has it."""
        self._index: set[str] = set()
        self._rounded: set[str] = set()

    def columns(self) -> tuple[str, ...]:
        assert self._chosen is not None  # a source has files
        if not self._chosen:
            raise ConfigError(f"{self._data.source} has no columns except the label column.")
        if self._index:
            self._say(
                f"{self._data.source}: the index of a pandas data frame is not used as a feature: column "
                f"{', '.join(map(repr, sorted(self._index)))}. To use it, add it to data.feature_columns."
            )
        if self._rounded:
            self._say(
                f"{self._data.source}: integers above {EXACT_INTEGER:,} are rounded to 32-bit floats in "
                f"column {', '.join(sorted(self._rounded))}"
            )
        return self._chosen

    def add(self, file: File, filesystem: fs.FileSystem | None) -> None:
        """Check the columns of a file. Raises ConfigError."""
        if filesystem is None:
            self._check_schema(file, built_in_table(file.path).schema)
            return
        with opened(filesystem, file.path) as parquet:
            schema = parquet.schema_arrow
            names = list(schema.names)
            for name, value in file.in_folders:
                if name in names:
                    self._check_same_value(file, filesystem, name, value)
                else:
                    schema = schema.append(pa.field(name, pa.scalar(value).type))
            features = self._check_schema(file, schema)
            for name in features:
                if name in names:
                    self._check_values(file, filesystem, parquet.metadata, name, schema.field(name))
            self._check_folders(file, features)

    def _check_schema(self, file: File, schema: pa.Schema) -> tuple[str, ...]:
        """Return the feature columns of a file. Raises ConfigError if it has other columns."""
        label, names = self._data.label_column, list(schema.names)
        chosen = self._chosen
        if self._data.feature_columns is None:
            index = index_columns(schema) - {label}
            self._index |= index
            found = tuple(name for name in names if name != label and name not in index)
            check_columns(file.path, names, label, *found, remedy=COLUMNS)
            if chosen is not None and set(found) != set(chosen):
                differing = sorted(set(found) ^ set(chosen))
                raise ConfigError(
                    f"{self._first} and {file.path} have different columns: {', '.join(differing[:SHOWN])} "
                    f"{'is' if len(differing) == 1 else 'are'} in only one of them. Select the feature "
                    "columns in data.feature_columns, or use files with the same columns."
                )
            chosen = chosen or found
        assert chosen is not None
        check_columns(file.path, names, label, *chosen, remedy=COLUMNS)
        self._chosen, self._first = chosen, self._first or file.path
        self._check_label(file, schema.field(label))
        wrong = [
            schema.field(name)
            for name in chosen
            if type_of(schema.field(name)).becomes(Use.FEATURE) is None
        ]
        if wrong:
            kinds = ", ".join(f"{field.name} ({field.type})" for field in wrong[:SHOWN])
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ConfigError(
                f"{file.path} has columns that are not numeric: {kinds}{more}.\n"
                "       Convert them to numbers, or select other columns in data.feature_columns."
            )
        return chosen

    def _check_label(self, file: File, field: pa.Field) -> None:
        """Raise ConfigError if the type of the labels is unsupported or differs between files."""
        if field.type == pa.null() and file.in_folders:
            return  # a folder of rows without labels: later checks report their row numbers
        require_use(file.path, field, self._use)
        kind = label_type(field)
        if self._label is None:
            self._label = kind, file.path
        known, first = self._label
        if pa.types.is_large_string(kind) != pa.types.is_large_string(known):
            raise ConfigError(
                f"column {field.name} is of type {field.type} in {file.path}, but contains "
                f"{'text' if pa.types.is_large_string(known) else 'numbers'} in {first}. Use one type in all "
                "files."
            )

    def _check_same_value(
        self, file: File, filesystem: fs.FileSystem, name: str, value: object
    ) -> None:
        """Raise ConfigError if the values of a column differ from the value in the folder's name."""
        plain = File(file.path, file.rows, file.size)
        for table in read_file(plain, [name], filesystem):
            for found in table[name].unique().to_pylist():
                if str(found) != str(value):
                    raise ConfigError(
                        f"{file.path} is in a folder for {name} = {value}, but its column {name} contains "
                        f"the value {found}. Remove the column, or rename the folder."
                    )

    def _check_values(
        self,
        file: File,
        filesystem: fs.FileSystem,
        metadata: pq.FileMetaData,
        name: str,
        field: pa.Field,
    ) -> None:
        """Raise ConfigError with the row number if a value is infinite or too large.

        Row groups are read only if their statistics do not rule out such a value.
        """
        start = 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group)
            limits = _limits(rows, name)
            is_integer = type_of(field).name == "integers"
            largest = LARGEST_INTEGER if is_integer else LARGEST_FLOAT
            if limits is None or not -largest <= limits[0] <= limits[1] <= largest:
                self._scan(file, filesystem, name, group, start)
            if is_integer and limits and max(-limits[0], limits[1]) > EXACT_INTEGER:
                self._rounded.add(name)
            start += rows.num_rows

    def _check_folders(self, file: File, features: Sequence[str]) -> None:
        """Raise ConfigError if a value in the name of a folder is too large."""
        for name, value in file.in_folders:
            if name not in features or not isinstance(value, int):
                continue
            if abs(value) > LARGEST_INTEGER:
                raise ConfigError(
                    f"{file.path} is in a folder for {name} = {value}, which is larger than 2^53, the "
                    "largest integer that a float represents exactly. Rename the folder, or select other "
                    "columns in data.feature_columns."
                )
            if abs(value) > EXACT_INTEGER:
                self._rounded.add(name)

    def _scan(
        self, file: File, filesystem: fs.FileSystem, name: str, group: int, start: int
    ) -> None:
        for table in read_file(file, [name], filesystem, [group]):
            row = first_unusable(table[name])
            if row is not None:
                value = table[name][row].as_py()
                is_integer = isinstance(value, int)
                limit = "2^53" if is_integer else f"{LARGEST_FLOAT:.2g}"
                kind = (
                    f"larger than {limit}, the limit of a 32-bit float"
                    if not is_integer and abs(value) != float("inf")
                    else f"larger than {limit}, the largest integer that a float represents exactly"
                    if is_integer
                    else "infinite"
                )
                raise ConfigError(
                    f"{file.path}: row {start + row} (from 0) of column {name} is {value}, which is {kind}. "
                    "Replace it (null stands for a missing value), or select other columns in "
                    "data.feature_columns."
                )
            start += table.num_rows


def _limits(rows: pq.RowGroupMetaData, name: str) -> tuple[float, float] | None:
    """Return the minimum and maximum of a column in a row group; None if the statistics lack them."""
    for index in range(rows.num_columns):
        column = rows.column(index)
        if column.path_in_schema == name:
            known = column.statistics
            if known is None or not known.has_min_max or isinstance(known.min, bytes):
                return None
            return known.min, known.max
    return None


def shortened(names: Sequence[object]) -> str:
    """Return the first few names in sorted order for an error message, and the number of the others."""
    shown = ", ".join(sorted(map(str, names))[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
