"""Columns of images in Parquet and Lance: how pixels are stored in a column, and how they become arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.sources.column_types import without_views
from trainyard_trainer.data.sources.images.samples import ReadImages
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.errors import ConfigError

SNIFFED_ROWS = 16
"""The number of rows that decide whether a column of bytes holds image files or pixels."""

NO_IMAGE = "it has no image"


class PixelLayout(NamedTuple):
    """The layout of pixels in a column."""

    stored: tuple[int, ...]
    """The sizes of the nested lists or of the tensor, or the length of flat values."""
    shape: tuple[int, int, int]
    is_channel_last: bool

    def to_images(self, values: np.ndarray) -> np.ndarray:
        """Return flat values (N * C * H * W) as images (N, C, H, W)."""
        channels, height, width = self.shape
        if self.is_channel_last:
            return values.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
        return values.reshape(-1, channels, height, width)


def find_layout(
    path: str, image_field: pa.Field, read_first: Callable[[], list]
) -> PixelLayout | None:
    """Return the layout of the pixels in a column; None for image files.

    `read_first` returns the first values of the column that are not null. Raises ConfigError for a column
    that holds neither.
    """
    column = image_field.name
    kind, tensor_shape = _storage(image_field)
    if _is_bytes(kind):
        return _sniff(path, image_field, read_first())
    if not _is_list(kind):
        raise ConfigError(
            f"{path}: column {column} is of type {image_field.type}, where bytes (of "
            "picture files or of pixels), lists or tensors of integers, or {bytes, path} are right."
        )
    if tensor_shape is not None:
        return _layout_of(tensor_shape, path, column)
    first = next((value for value in read_first() if value), None)
    sizes = []
    while isinstance(first, list):
        sizes.append(len(first))
        first = first[0] if first else None
    return _layout_of(tuple(sizes), path, column)


def _storage(image_field: pa.Field) -> tuple[pa.DataType, tuple[int, ...] | None]:
    """Return the type that a column is stored as, and the shape of a tensor column.

    Without Ray, the tensors of Ray are lists whose metadata has the shape.
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
    """Whether the type is a list of integers, nested or not."""
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        return False
    return _is_list(kind.value_type) or pa.types.is_integer(kind.value_type)


def first_values(filesystem: fs.FileSystem, path: str, image_field: pa.Field) -> list:
    """Return the first values of a column of a Parquet file that are not null, as Python values."""
    with explained_errors(path), filesystem.open_input_file(path) as stream:
        file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
        batches = file.iter_batches(batch_size=SNIFFED_ROWS, columns=[image_field.name])
        first = next(batches, None)
    if first is None:
        return []
    values = plain(first.column(0))
    return [value for value in values.to_pylist() if value is not None]


def plain(values: pa.Array) -> pa.Array:
    """Return the bytes or lists inside an extension type or a struct."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_struct(values.type):
        values = pc.struct_field(values, "bytes")
    return without_views(values)


def _sniff(path: str, image_field: pa.Field, values: list) -> PixelLayout | None:
    # It imports torch, which other columns do not need.
    from trainyard_trainer.data.image_codec import UnreadableError, read_header

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
    """Return the layout of values of these sizes. Raises ConfigError if they cannot be an image."""
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


def to_pixels(values: pa.Array, layout: PixelLayout) -> ReadImages:
    """Return bytes or lists of integers as pixels, without a step per row if all rows are good."""
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
    """Return all numbers of an array without nulls as a flat array."""
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
    """Return which values of an array without nulls have wrong sizes, (N,) bool."""
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
