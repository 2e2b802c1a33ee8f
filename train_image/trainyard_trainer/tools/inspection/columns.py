"""Describe the column of a table: its type, missing values, and range or distinct values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from trainyard_trainer.run_files.sizes import size_text

SHOWN_VALUES = 4
"""The largest number of distinct texts that are shown."""

SHOWN_CHARACTERS = 24
"""The largest number of characters of a text that are shown."""

SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"RIFF": "WebP or WAV",
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
}
"""The kind of a file by its first bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnDescription:
    """What is known of a column from the rows that were read."""

    name: str
    type: str
    missing: int
    """The number of rows without a value."""
    nan: int | None = None
    """The number of values that are NaN; None for types that have none."""
    least: float | int | None = None
    """The smallest number, shortest text or bytes, or smallest number in all lists."""
    largest: float | int | None = None
    mean: float | None = None
    shape: tuple[int, ...] = ()
    """The shape of tensors."""
    lengths: tuple[int, int] | None = None
    """The smallest and the largest length of texts (characters), bytes or lists."""
    distinct: int | None = None
    """The number of different values, of texts, integers and booleans."""
    values: tuple[str, ...] = ()
    """The most frequent texts, or the kind of file that bytes are."""

    def to_json(self) -> dict[str, Any]:
        """Return what is known as JSON, without what this type of column does not have."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}

    def contents(self) -> str:
        """Return the values in a few words."""
        parts = []
        if self.shape:
            parts.append(f"shape {' x '.join(map(str, self.shape))}")
        if self.lengths is not None:
            unit = size_text if _is_bytes(self.type) else "{:,}".format
            parts.append(_range("length", *map(unit, self.lengths)))
        if self.least is not None and self.largest is not None:
            parts.append(_range("", f"{self.least:,.6g}", f"{self.largest:,.6g}"))
        if self.mean is not None:
            parts.append(f"mean {self.mean:,.6g}")
        if self.distinct is not None:
            parts.append(f"{self.distinct:,} different")
        if self.values:
            parts.append(", ".join(self.values))
        if self.nan:
            parts.append(f"{self.nan:,} NaN")
        return "; ".join(parts)


def _range(name: str, least: str, largest: str) -> str:
    text = least if least == largest else f"{least} to {largest}"
    return f"{name} {text}".strip()


def _is_bytes(kind: str) -> bool:
    return "binary" in kind or kind.startswith((".", "struct<bytes"))


def describe_column(name: str, column: pa.ChunkedArray, shown_type: str) -> ColumnDescription:
    """Describe a column of a table in memory. `shown_type` is its type for messages."""
    missing = column.null_count
    column = column.drop_null()
    if kinds.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    known = _known(_plain(column)) if len(column) else {}
    if isinstance(column.type, pa.FixedShapeTensorType):
        known |= {"shape": tuple(column.type.shape), "lengths": None}
    return ColumnDescription(name=name, type=shown_type, missing=missing, **known)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the storage of an extension type, and the bytes of files as `datasets` stores them."""
    if isinstance(column.type, pa.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        return _plain(pa.chunked_array(storage, column.type.storage_type))
    if kinds.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        return pc.struct_field(column, "bytes").drop_null()
    return column


def _known(column: pa.ChunkedArray) -> dict[str, Any]:
    """Return the fields of a description that follow from the values, none of which is missing."""
    kind = column.type
    if kinds.is_boolean(kind):
        return _numbers(column.cast(pa.int8())) | {"distinct": pc.count_distinct(column).as_py()}
    if kinds.is_integer(kind):
        return _numbers(column) | {"distinct": pc.count_distinct(column).as_py()}
    if kinds.is_floating(kind) or kinds.is_decimal(kind):
        return _numbers(column.cast(pa.float64()), has_nan=True)
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        return _texts(column.cast(pa.large_string()))
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind):
        return _bytes(column)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return _lists(column)
    return {}


def _numbers(column: pa.ChunkedArray, *, has_nan: bool = False) -> dict[str, Any]:
    nan = None
    if has_nan:
        is_nan = pc.is_nan(column)
        nan = pc.sum(is_nan).as_py() or 0
        column = column.filter(pc.invert(is_nan))
    if not len(column):
        return {"nan": nan}
    ends = pc.min_max(column).as_py()
    mean = pc.mean(column).as_py()
    return {"least": ends["min"], "largest": ends["max"], "mean": mean, "nan": nan}


def _texts(column: pa.ChunkedArray) -> dict[str, Any]:
    counts = column.value_counts()
    order = np.argsort(-counts.field("counts").to_numpy(zero_copy_only=False), kind="stable")
    most = counts.field("values").take(pa.array(order[:SHOWN_VALUES])).to_pylist()
    return {
        "lengths": _ends(pc.utf8_length(column)),
        "distinct": len(counts),
        "values": tuple(_shortened(value) for value in most),
    }


def _bytes(column: pa.ChunkedArray) -> dict[str, Any]:
    start = column[0].as_py()[:8]
    found = tuple(kind for signature, kind in SIGNATURES.items() if start.startswith(signature))
    return {"lengths": _ends(pc.binary_length(column)), "values": found}


def _lists(column: pa.ChunkedArray) -> dict[str, Any]:
    lengths = _ends(pc.list_value_length(column))
    inner = column
    while kinds.is_nested(inner.type) and hasattr(inner.type, "value_type"):
        inner = pc.list_flatten(inner).drop_null()
    known = _known(inner) if len(inner) else {}
    return {name: value for name, value in known.items() if name != "distinct"} | {
        "lengths": lengths
    }


def _ends(lengths: pa.ChunkedArray) -> tuple[int, int]:
    found = pc.min_max(lengths).as_py()
    return found["min"], found["max"]


def _shortened(text: str) -> str:
    """Return a text as it is printed: quoted, without line breaks, and not too long."""
    short = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
    return repr(short)
