"""The registry of column types: what a column of each type becomes as a feature and as a label.

The table of the documentation is made from it, and a test writes and reads a column of each row. To
understand another type, add or change its row here and the conversion below.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from trainyard_trainer.errors import ConfigError

LARGEST_FLOAT = float(np.finfo(np.float32).max)
LARGEST_INTEGER = 2**53
"""The largest integer up to which a 64-bit float has every integer. Larger ones are mostly identifiers."""

EXACT_INTEGER = 2**24
"""The same of a 32-bit float, which features and the labels of regressions become."""

MISSING = (
    *(
        "",
        "nan",
        "NaN",
        "NAN",
        "-nan",
        "-NaN",
        "NaT",
        "null",
        "NULL",
        "None",
        "NA",
        "<NA>",
        "N/A",
        "n/a",
    ),
    *("#NA", "#N/A", "#N/A N/A", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
"""Texts that stand for a missing label: those that `pandas.read_csv` reads as missing, and those that
`astype(str)` makes of missing values."""


class Use(Enum):
    """What a column of a source is used for."""

    FEATURE = "feature"
    """A column that gradient boosting learns from."""
    CLASS = "class"
    """The label of gradient boosting with the objective binary or multiclass."""
    NUMBER = "number"
    """The label of gradient boosting with the objective regression."""
    IMAGE = "image label"
    """The label of an image."""


RIGHT = {
    Use.FEATURE: "numbers and booleans are right",
    Use.CLASS: "numbers, booleans and text are right",
    Use.NUMBER: "numbers are right, since train.objective = regression learns numbers",
    Use.IMAGE: "integers from 0 or strings are right",
}
"""The end of the error message for a type that is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnType:
    """A row of the table: types of Arrow, and what they become for each use; None where they are refused."""

    name: str
    arrow: str
    """Names of the types, as Arrow spells them."""
    matches: Callable[[pa.DataType], bool]
    feature: str | None = None
    class_label: str | None = None
    number_label: str | None = None
    image_label: str | None = None

    def becomes(self, use: Use) -> str | None:
        """Return what a column of these types becomes, in words; None if it is refused."""
        return {
            Use.FEATURE: self.feature,
            Use.CLASS: self.class_label,
            Use.NUMBER: self.number_label,
            Use.IMAGE: self.image_label,
        }[use]


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _is_whole_decimal(kind: pa.DataType) -> bool:
    return bool(types.is_decimal(kind)) and kind.scale <= 0


def _is_nested(kind: pa.DataType) -> bool:
    return bool(types.is_nested(kind))


EXTENSIONS = ColumnType(
    name="extension types and all others",
    arrow="uuid, json, tensors, those of pandas and others",
    matches=lambda kind: isinstance(kind, pa.BaseExtensionType),
)

COLUMN_TYPES: tuple[ColumnType, ...] = (
    ColumnType(
        name="booleans",
        arrow="bool, bool8",
        matches=types.is_boolean,
        feature="0 and 1",
        class_label="classes 0 and 1",
        number_label="0 and 1",
        image_label="classes 0 and 1",
    ),
    ColumnType(
        name="integers",
        arrow="int8 to int64, uint8 to uint64",
        matches=types.is_integer,
        feature="a 32-bit float; refused above 2^53",
        class_label="a class per number",
        number_label="a 32-bit float; refused above 2^53",
        image_label="the class with that number, from 0",
    ),
    ColumnType(
        name="floats",
        arrow="halffloat, float, double",
        matches=types.is_floating,
        feature="a 32-bit float; NaN is missing; infinite and larger than 3.4e38 are refused",
        class_label="a class per number; infinite ones are refused",
        number_label="a 32-bit float; infinite and larger than 3.4e38 are refused",
    ),
    ColumnType(
        name="decimals without fraction digits",
        arrow="decimal32 to decimal256 of scale 0",
        matches=_is_whole_decimal,
        feature="a 32-bit float; refused above 3.4e38",
        class_label="a class per number",
        number_label="a 32-bit float; refused above 3.4e38",
        image_label="the class with that number, from 0",
    ),
    ColumnType(
        name="decimals with fraction digits",
        arrow="decimal32 to decimal256",
        matches=types.is_decimal,
        feature="a 32-bit float; refused above 3.4e38",
        class_label="a class per number",
        number_label="a 32-bit float; refused above 3.4e38",
    ),
    ColumnType(
        name="text",
        arrow="string, large_string, string_view",
        matches=_is_text,
        class_label="a class per text",
        image_label="a class per text",
    ),
    ColumnType(
        name="bytes",
        arrow="binary, large_binary, binary_view, fixed_size_binary",
        matches=_is_bytes,
        class_label="a class per text, read as UTF-8",
        image_label="a class per text, read as UTF-8",
    ),
    ColumnType(
        name="null", arrow="null", matches=types.is_null, feature="a column of missing values"
    ),
    ColumnType(name="dates", arrow="date32, date64", matches=types.is_date),
    ColumnType(name="times of day", arrow="time32, time64", matches=types.is_time),
    ColumnType(name="timestamps", arrow="timestamp", matches=types.is_timestamp),
    ColumnType(name="durations", arrow="duration", matches=types.is_duration),
    ColumnType(
        name="lists, structs and maps",
        arrow="list, large_list, fixed_size_list, struct, map",
        matches=_is_nested,
    ),
    EXTENSIONS,
)


def column_types_table() -> str:
    """Return the table of column types in Markdown."""

    def row(each: ColumnType) -> str:
        cells = [each.becomes(use) or "refused" for use in Use]
        return " | ".join([each.name, each.arrow, *cells])

    uses = ("feature", "label of binary and multiclass", "label of regression", "label of an image")
    head = " | ".join(["type", "Arrow's names", *uses])
    return "\n".join(
        f"| {line} |" for line in (head, " | ".join(["---"] * 6), *map(row, COLUMN_TYPES))
    )


def type_of(field: pa.Field) -> ColumnType:
    """Return the row of the registry for a column; a dictionary counts as the type of its values."""
    kind = field.type
    is_extension = b"ARROW:extension:name" in (field.metadata or {})
    if types.is_dictionary(kind):
        return type_of(pa.field(field.name, kind.value_type))
    if isinstance(kind, pa.Bool8Type):
        kind = pa.bool_()
    if is_extension:
        return EXTENSIONS
    return next((each for each in COLUMN_TYPES if each.matches(kind)), EXTENSIONS)


def require_use(path: str, field: pa.Field, use: Use) -> None:
    """Raise ConfigError if a column of this type cannot be used so."""
    if type_of(field).becomes(use) is None:
        raise ConfigError(
            f"{path}: column {field.name} is of type {field.type}, where {RIGHT[use]}. "
            "Convert the column, or name another one."
        )


# Conversion.


def label_type(field: pa.Field) -> pa.DataType:
    """Return the type that `to_labels` makes of a column: int64, float64 or large_string."""
    return to_labels(pa.chunked_array([], field.type), "", field.name).type


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of a dictionary or of bool8; all other columns as they are."""
    kind = column.type
    if types.is_dictionary(kind):
        return column.cast(kind.value_type)
    if isinstance(kind, pa.Bool8Type):
        return column.cast(pa.bool_())
    return column


def without_views(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return text or bytes of a view type as large_string or large_binary: Arrow cannot filter views."""
    if types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if types.is_binary_view(column.type) else column


def to_floats(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column of features or of numeric labels as (N,) float32, with NaN for missing values."""
    numbers: np.ndarray = _decoded(column).cast(pa.float32(), safe=False).to_numpy()
    return numbers


def first_unusable(column: pa.ChunkedArray) -> int | None:
    """Return the first row whose number is infinite or too large for `to_floats`; None if there is none."""
    column = _decoded(column)
    if types.is_integer(column.type):
        integers = pc.fill_null(column, 0).to_numpy()
        is_bad = integers > LARGEST_INTEGER
        if types.is_signed_integer(column.type):
            is_bad |= integers < -LARGEST_INTEGER
        rows = np.flatnonzero(is_bad)
    else:
        numbers = column.cast(pa.float64(), safe=False).to_numpy()
        rows = np.flatnonzero(np.abs(numbers) > LARGEST_FLOAT)
    return int(rows[0]) if len(rows) else None


def to_labels(column: pa.ChunkedArray, path: str, name: str) -> pa.ChunkedArray:
    """Return labels as int64, float64 or large_string, with null for each missing or infinite one.

    The type of the column must be one that `require_use` lets pass. Raises ConfigError for bytes or text
    that are not UTF-8, and for integers of more than 63 bits.
    """
    column = _decoded(column)
    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or _is_whole_decimal(kind):
        try:
            # Arrow has no conversion of small decimals to integers.
            wide = pa.decimal256(76, 0) if types.is_decimal(kind) else kind
            return column.cast(wide).cast(pa.int64())
        except pa.ArrowInvalid:
            raise ConfigError(
                f"{path}: column {name} has a label above 2^63, which is most likely an identifier and no "
                "class. Number the classes from 0, or use text."
            ) from None
    if types.is_floating(kind) or types.is_decimal(kind):
        numbers = column.cast(pa.float64(), safe=False)
        # -0.0 and 0.0 are one class.
        return pc.if_else(pc.is_finite(numbers), pc.add(numbers, 0.0), None)
    texts = _to_text(column, path, name)
    return pc.if_else(pc.is_in(texts, pa.array(MISSING, texts.type)), None, texts)


def refuse_lookalikes(classes: Iterable[str]) -> None:
    """Raise ConfigError if two classes differ only in spaces around them or in the form of their letters.

    Unicode has two forms of a letter with an accent: macOS writes names of files in the other one.
    """
    seen: dict[str, str] = {}
    for name in classes:
        other = seen.setdefault(unicodedata.normalize("NFC", name).strip(), name)
        if other != name:
            raise ConfigError(
                f"the labels {other!a} and {name!a} look alike: they differ only in spaces around them, or "
                "in how letters with accents are encoded. Use one of them."
            )


def _to_text(column: pa.ChunkedArray, path: str, name: str) -> pa.ChunkedArray:
    if types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    try:
        texts = column.cast(pa.large_string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        values = column.cast(pa.large_binary()).to_pylist()
        row = next(row for row, value in enumerate(values) if value and not _is_utf8(value))
        shown = values[row].decode("utf-8", "backslashreplace")
        raise ConfigError(
            f"{path}: column {name} has a label that is not UTF-8: {shown!r}, in row {row} (from 0). Decode "
            "the labels before you write them."
        ) from None
    return texts


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
