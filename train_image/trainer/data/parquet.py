"""How images lie in Parquet: columns `id` int64, `image` raw bytes, `label` int64.

An image is its pixels, uint8, in the order channel, row, column. All images of a file have one shape; it
is in the schema's metadata, with the names of the classes and the training images' mean and spread.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer.errors import RunError
from trainer.folder import RunFolder

METADATA_KEY = b"trainyard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """What a Parquet file of images says about itself."""

    source: str
    shape: tuple[int, int, int]
    """Channels, rows, columns."""
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Of the training images, per channel, with pixels from 0 to 1."""
    spread: tuple[float, ...]
    """Standard deviation of the training images, per channel."""

    @property
    def bytes_per_image(self) -> int:
        return int(np.prod(self.shape))


def to_table(
    images: Images, ids: np.ndarray, pixels_NCHW: np.ndarray, labels: np.ndarray
) -> pa.Table:
    data = pa.py_buffer(np.ascontiguousarray(pixels_NCHW, dtype=np.uint8))
    fixed = pa.Array.from_buffers(pa.binary(images.bytes_per_image), len(ids), [None, data])
    schema = pa.schema(
        [("id", pa.int64()), ("image", pa.binary()), ("label", pa.int64())],
        metadata={METADATA_KEY: json.dumps(asdict(images))},
    )
    return pa.table([pa.array(ids), fixed.cast(pa.binary()), pa.array(labels)], schema=schema)


def read_header(folder: RunFolder, path: str) -> tuple[Images, int]:
    """What the file holds, and how many images, from its footer alone."""
    with folder.filesystem.open_input_file(path) as file:
        footer = pq.read_metadata(file)
    known = json.loads((footer.metadata or {}).get(METADATA_KEY, b"{}"))
    if not known:
        raise RunError(
            f"{folder.show(path)} was not written by trainyard: its schema has no "
            f"`{METADATA_KEY.decode()}` metadata. Remove it, and the run writes it again."
        )
    known = {
        key: tuple(value) if isinstance(value, list) else value for key, value in known.items()
    }
    return Images(**known), footer.num_rows


def decode(table: pa.Table, images: Images) -> dict[str, np.ndarray]:
    """Columns as arrays, without a step per row: image (N, C, H, W) uint8, label (N,) int64, id (N,).

    Read-only where no copy was needed.
    """
    pixels = _joined(table["image"], images.bytes_per_image)
    return {
        "image": pixels.reshape(-1, *images.shape),
        "label": table["label"].to_numpy(),
        "id": table["id"].to_numpy(),
    }


def _joined(column: pa.ChunkedArray, size: int) -> np.ndarray:
    """The bytes of all values one after the other, as (N, size)."""
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of no chunk at all
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.binary())
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != size)
    if len(wrong):
        raise RunError(
            f"image of row {wrong[0]} has {lengths[wrong[0]]:.0f} bytes where {size} are right, "
            f"and so have {len(wrong)} of {len(lengths)} rows."
        )
    offset_type = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    if len(values) == 0:
        return np.empty((0, size), np.uint8)
    _, offsets, data = values.buffers()
    start = np.frombuffer(offsets, offset_type)[values.offset]
    return np.frombuffer(data, np.uint8, count=len(values) * size, offset=start).reshape(-1, size)
