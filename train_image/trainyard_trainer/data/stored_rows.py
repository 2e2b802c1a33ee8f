"""The rows of a prepared data set: written as Parquet, and read as arrays."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainyard_trainer.data.prepared import (
    FORMAT,
    ID,
    METADATA_KEY,
    DataColumn,
    DatasetInfo,
    Prepared,
    PreparedInfo,
)
from trainyard_trainer.errors import RunError
from trainyard_trainer.storage import StorageFolder

DECODER = "trainyard_trainer.data.image_codec"
"""The module that decodes files. It imports torch, which takes seconds."""

ROW_GROUP_BYTES = 16 * 2**20
ROW_GROUPS = 4
"""The smallest number of row groups of a file; a row group is the smallest unit that can be read."""

# Writing.


def header_of(
    source: str, shape: tuple[int, int, int], encoding: str, classes: tuple[str, ...]
) -> dict[str, Any]:
    """Return the metadata of each Parquet file: all that is known before the last file is written."""
    return {
        "format": FORMAT,
        "source": source,
        "shape": shape,
        "encoding": encoding,
        "classes": classes,
    }


def to_table(
    info: DatasetInfo, ids: np.ndarray, pixels_NCHW: np.ndarray, labels: np.ndarray
) -> pa.Table:
    """Return rows of a data set as a table with raw pixels."""
    header = header_of(info.source, info.shape, info.encoding, info.classes)
    return _table(header, ids, _image_columns(pixels_to_values(pixels_NCHW), labels))


def pixels_to_values(pixels_NCHW: np.ndarray) -> pa.Array:
    """Return an array of N binary values that shares the memory of the pixels."""
    return bytes_of_rows(np.asarray(pixels_NCHW, np.uint8))


def bytes_of_rows(rows: np.ndarray) -> pa.Array:
    """Return the rows of an array as binary values that share its memory."""
    data = np.ascontiguousarray(rows)
    count, size = len(data), math.prod(data.shape[1:]) * data.itemsize
    fixed = pa.Array.from_buffers(pa.binary(size), count, [None, pa.py_buffer(data)])
    return fixed.cast(pa.binary())


def write_part(
    header: dict[str, Any], file: str, first_id: int, values: pa.Array, labels: np.ndarray
) -> bytes:
    """Return the bytes of a Parquet file of images; its first row has the id `first_id`."""
    # LZ4 halves most pixels and is read at nearly the speed of none; pictures are compressed already.
    compression = "lz4" if header["encoding"] == "raw" else "none"
    columns = _image_columns(values, labels)
    return _write(header, file, first_id, columns, compression, statistics=["id", "label"])


def write_token_part(
    header: dict[str, Any],
    file: str,
    first_id: int,
    tokens: np.ndarray,
    flags: np.ndarray | None = None,
    *,
    numbers: np.dtype[Any],
) -> bytes:
    """Return the bytes of a Parquet file of tokens (N, T), with flags or not; its first row has this id.

    `numbers` is the type as which tokens are stored.
    """
    columns = {"tokens": bytes_of_rows(tokens.astype(numbers.newbyteorder("<"), copy=False))}
    if flags is not None:
        columns["flags"] = bytes_of_rows(flags)
    return _write(header, file, first_id, columns, "zstd", statistics=["id"])


def _image_columns(values: pa.Array, labels: np.ndarray) -> dict[str, pa.Array]:
    return {"image": values, "label": pa.array(labels, pa.int64())}


def _write(
    header: dict[str, Any],
    file: str,
    first_id: int,
    columns: dict[str, pa.Array],
    compression: str,
    *,
    statistics: list[str],
) -> bytes:
    largest = max(columns.values(), key=lambda values: values.nbytes)
    count = len(largest)
    position = {"file": file, "first_id": first_id, "rows": count}
    table = _table(header | position, np.arange(first_id, first_id + count), columns)
    num_groups = max(ROW_GROUPS, math.ceil(largest.nbytes / ROW_GROUP_BYTES))
    output = io.BytesIO()
    pq.write_table(
        table,
        output,
        row_group_size=max(1, math.ceil(count / num_groups)),
        compression=compression,
        use_dictionary=False,
        write_statistics=statistics,
    )
    return output.getvalue()


def _table(header: dict[str, Any], ids: np.ndarray, columns: dict[str, pa.Array]) -> pa.Table:
    schema = pa.schema(
        [("id", pa.int64()), *((name, values.type) for name, values in columns.items())],
        metadata={METADATA_KEY: json.dumps(header)},
    )
    return pa.table([pa.array(ids), *columns.values()], schema=schema)


# Reading.


def decode(
    table: pa.Table, info: PreparedInfo, *, threads: int | None = None
) -> dict[str, np.ndarray]:
    """Return the columns of `info.columns` as arrays whose first axis has the rows, and `id` (N,) int64.

    Raw values need no step per row, and are read-only if no copy was needed. Tokens become int32. Image files
    are decoded by `threads` threads, by default as many as torch has. Raises RunError with the row of a
    damaged image.
    """
    arrays = {name: _array(table, info, column, threads) for name, column in info.columns.items()}
    return arrays | {ID: table[ID].to_numpy()}


def _array(
    table: pa.Table, info: PreparedInfo, column: DataColumn, threads: int | None
) -> np.ndarray:
    if not column.shape:
        return table[column.stored].to_numpy()
    if column.is_encoded:
        assert isinstance(info, DatasetInfo)
        return _decoded(table, info, threads)
    stored = _joined(table, column).view(column.numbers).reshape(-1, *column.shape)
    return stored.astype(column.dtype, copy=False)


def without_files(table: pa.Table, info: DatasetInfo) -> pa.Table:
    """Return the same rows with raw pixels in place of image files."""
    columns = decode(table, info)
    return to_table(info, columns[ID], columns["image"], columns["label"])


def _decoded(table: pa.Table, info: DatasetInfo, threads: int | None) -> np.ndarray:
    # Only image files need torch.
    import torch

    from trainyard_trainer.data import image_codec

    column = table["image"].to_pylist()
    pixels = np.empty((len(column), *info.shape), np.uint8)

    def fill(row: int) -> None:
        try:
            pixels[row] = image_codec.decode(column[row], info.shape)
        except image_codec.UnreadableError as error:
            raise RunError(
                f"{_where(table, row)} of {info.source} cannot be decoded: {error}. "
                "Prepare the data again: trainyard data prepare."
            ) from error

    threads = min(threads or torch.get_num_threads(), len(column))
    if threads <= 1:
        _each(fill, range(len(column)))
        return pixels
    with ThreadPoolExecutor(threads) as pool:
        # A few rows at a time: one by one the pool costs as much as a small picture.
        stretches = np.array_split(np.arange(len(column)), threads * 4)
        for done in [pool.submit(_each, fill, rows.tolist()) for rows in stretches]:
            done.result()
    return pixels


def _each(work: Callable[[int], None], rows: Iterable[int]) -> None:
    for row in rows:
        work(row)


def _where(table: pa.Table, row: int) -> str:
    """Return a sample's id for an error message, and its file and row if the table is of one file."""
    sample = table["id"][row].as_py()
    header = json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    text = f"sample {sample}"
    if "file" in header and 0 <= sample - header["first_id"] < header["rows"]:
        text += f" ({header['file']}, row {sample - header['first_id']})"
    return text


def _joined(table: pa.Table, column: DataColumn) -> np.ndarray:
    """Return the bytes of all values of a column as an array (N, size)."""
    size = column.stored_bytes
    chunks = table[column.stored]
    # combine_chunks copies a single chunk, too.
    values = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of no chunk at all
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.binary())
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != size)
    if len(wrong):
        raise RunError(
            f"{column.stored} of {_where(table, wrong[0])} has {lengths[wrong[0]]:.0f} bytes where {size} "
            f"are right, and so have {len(wrong)} of {len(lengths)} rows."
        )
    offset_type = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    if len(values) == 0:
        return np.empty((0, size), np.uint8)
    _, offsets, data = values.buffers()
    start = np.frombuffer(offsets, offset_type)[values.offset]
    return np.frombuffer(data, np.uint8, count=len(values) * size, offset=start).reshape(-1, size)


def read_validation(data: Prepared, rows: Sequence[int], column: str) -> np.ndarray:
    """Return a column of these validation samples, with one row group in memory at a time."""
    known = data.info.columns[column]
    values = np.empty((len(rows), *known.shape), known.dtype)
    folder = StorageFolder(data.open_filesystem(), data.path)
    start = 0
    for path, count in zip(data.valid.files, data.valid.rows, strict=True):
        if any(start <= row < start + count for row in rows):
            with (
                folder.explained("read", path),
                folder.filesystem.open_input_file(path) as stream,
            ):
                _pick(pq.ParquetFile(stream), start, data, rows, column, values)
        start += count
    return values


def _pick(
    file: pq.ParquetFile,
    start: int,
    data: Prepared,
    rows: Sequence[int],
    column: str,
    values: np.ndarray,
) -> None:
    """Copy those of the rows that are in a file, whose first row is `start`, to their places in `values`."""
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        places = [place for place, row in enumerate(rows) if start <= row < end]
        if places:
            found = file.read_row_group(group).take([rows[place] - start for place in places])
            values[places] = decode(found, data.info)[column]
        start = end
