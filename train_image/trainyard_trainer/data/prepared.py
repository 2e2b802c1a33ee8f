"""A prepared data set: Parquet files with the columns `id` int64, `image` bytes and `label` int64.

    <path>/dataset.json                 the description of the data set; written last, so an incomplete data
                                        set has none
    <path>/train/part-00000.parquet     samples in random order, in row groups of a few MB
    <path>/valid/part-00000.parquet

The column `image` holds pixels (uint8, in the order channel, row, column) or a plain image file (see
`image_codec.py`); for text it holds the bytes of a row (see `sources/text.py`). The id of a sample is its row
number in its split.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import StorageFolder, open_filesystem

METADATA_KEY = b"trainyard"

ID = "id"
"""The column of the samples' ids, in files and in arrays."""

DECODER = "trainyard_trainer.data.image_codec"
"""The module that decodes files. It imports torch, which takes seconds."""

FORMAT = 2
"""The version of dataset.json. A file of another version is refused."""

DATASET = "dataset.json"

ROW_GROUP_BYTES = 16 * 2**20
ROW_GROUPS = 4
"""The smallest number of row groups of a file; a row group is the smallest unit that can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataColumn:
    """What each sample of a data set has in one column."""

    shape: tuple[int, ...]
    """The shape of a decoded value."""
    dtype: Literal["uint8", "int64"]
    stored: str
    """The column of the Parquet files that has the values: as numbers if `shape` is empty, else as bytes."""
    is_encoded: bool = False
    """Whether the bytes are a file of any size, which has to be decoded."""

    @property
    def bytes(self) -> int:
        """The size of a decoded value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """The format and statistics of a prepared data set: what all its samples have in common."""

    source: str
    """The path or name of the source that was prepared."""
    shape: tuple[int, int, int]
    """Channels, rows and columns of each decoded image. A row of N bytes of text has the shape (1, 1, N)."""
    kind: Literal["images", "text"] = "images"
    encoding: Literal["raw", "encoded"] = "raw"
    """How the column `image` stores images: `raw` pixels, or `encoded` image files."""
    classes: tuple[str, ...]
    """The names of the classes, by label."""
    mean: tuple[float, ...]
    """The mean of the training images, per channel, with pixels from 0 to 1."""
    std: tuple[float, ...]
    """The standard deviation of the training images, per channel, with pixels from 0 to 1."""

    @property
    def bytes_per_sample(self) -> int:
        """The size of a decoded image, or of a row of text."""
        return int(np.prod(self.shape))

    @property
    def columns(self) -> dict[str, DataColumn]:
        """The columns of a batch by name: `image` and `label`, or `text`."""
        if self.kind == "text":
            return {
                "text": DataColumn(shape=(self.bytes_per_sample,), dtype="uint8", stored="image")
            }
        is_encoded = self.encoding == "encoded"
        return {
            "image": DataColumn(
                shape=self.shape, dtype="uint8", stored="image", is_encoded=is_encoded
            ),
            "label": DataColumn(shape=(), dtype="int64", stored="label"),
        }

    @property
    def stored(self) -> list[str]:
        """The columns of the Parquet files that a loader reads."""
        return [ID, *(column.stored for column in self.columns.values())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The Parquet files of the training or the validation samples."""

    files: tuple[str, ...]
    """The paths of the files, as the filesystem of the data set takes them."""
    rows: tuple[int, ...]
    """The number of rows of each file."""

    @property
    def count(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A prepared data set that a loader can read."""

    info: DatasetInfo
    train: Split
    valid: Split
    path: str
    """The path or URL as in a run file."""
    endpoint: str | None
    """The address of the S3 server; None for AWS, or for a disk."""
    bad_samples: int = 0
    """The number of samples that could not be read and were left out."""

    @property
    def num_train(self) -> int:
        return self.train.count

    @property
    def num_valid(self) -> int:
        return self.valid.count

    def open_filesystem(self) -> fs.FileSystem:
        """Open the filesystem of the splits' files."""
        return open_filesystem(self.path, self.endpoint)[0]


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
    return _table(header, ids, pixels_to_values(pixels_NCHW), labels)


def pixels_to_values(pixels_NCHW: np.ndarray) -> pa.Array:
    """Return an array of N binary values that shares the memory of the pixels."""
    data = np.ascontiguousarray(pixels_NCHW, dtype=np.uint8)
    count, size = len(data), math.prod(data.shape[1:])
    fixed = pa.Array.from_buffers(pa.binary(size), count, [None, pa.py_buffer(data)])
    return fixed.cast(pa.binary())


def write_part(
    header: dict[str, Any], file: str, first_id: int, values: pa.Array, labels: np.ndarray
) -> bytes:
    """Return the bytes of a Parquet file of a split; its first row has the id `first_id`."""
    position = {"file": file, "first_id": first_id, "rows": len(values)}
    ids = np.arange(first_id, first_id + len(values))
    table = _table(header | position, ids, values, labels)
    num_groups = max(ROW_GROUPS, math.ceil(values.nbytes / ROW_GROUP_BYTES))
    output = io.BytesIO()
    pq.write_table(
        table,
        output,
        row_group_size=max(1, math.ceil(len(table) / num_groups)),
        # LZ4 halves most pixels and is read at nearly the speed of none; pictures are compressed already.
        compression="lz4" if header["encoding"] == "raw" else "none",
        use_dictionary=False,
        write_statistics=["id", "label"],
    )
    return output.getvalue()


def _table(
    header: dict[str, Any], ids: np.ndarray, values: pa.Array, labels: np.ndarray
) -> pa.Table:
    schema = pa.schema(
        [("id", pa.int64()), ("image", values.type), ("label", pa.int64())],
        metadata={METADATA_KEY: json.dumps(header)},
    )
    return pa.table([pa.array(ids), values, pa.array(labels)], schema=schema)


# Reading.


def is_prepared(folder: RunFolder) -> bool:
    return folder.exists(f"{folder.root}/{DATASET}")


def read_dataset_json(folder: RunFolder) -> dict[str, Any]:
    """Return the content of dataset.json. Raises ConfigError if it is of another version or damaged."""
    path = f"{folder.root}/{DATASET}"
    try:
        known = json.loads(folder.read(path))
        found = known["format"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder.show(path)} was not written by `trainyard data prepare`: {error}."
        ) from error
    if found != FORMAT:
        raise ConfigError(
            f"{folder.show(path)} has format {found}, and this version reads {FORMAT}. "
            "Prepare the data again: trainyard data prepare."
        )
    return known


def read_prepared(folder: RunFolder, *, path: str, endpoint: str | None) -> Prepared:
    """Return the data set of a folder; `path` and `endpoint` are those of the run file.

    Raises ConfigError if a file is missing or has a size other than dataset.json says.
    """
    known = read_dataset_json(folder)
    files = {name: known["splits"][name]["files"] for name in ("train", "valid")}
    _check_files(folder, [file for part in files.values() for file in part])
    return Prepared(
        info=info_of_json(known["images"]),
        **{
            name: Split(
                files=tuple(f"{folder.root}/{file['file']}" for file in part),
                rows=tuple(file["rows"] for file in part),
            )
            for name, part in files.items()
        },
        path=path,
        endpoint=endpoint,
        bad_samples=len(known["bad_samples"]),
    )


def info_of_json(known: dict[str, Any]) -> DatasetInfo:
    """Return the info that a JSON object holds, with tuples in place of lists."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in known.items()
    }
    return DatasetInfo(**values)


def _check_files(folder: RunFolder, files: Sequence[dict[str, Any]]) -> None:
    infos = folder.infos([f"{folder.root}/{file['file']}" for file in files])
    for info, file in zip(infos, files, strict=True):
        if info.type != fs.FileType.File or info.size != file["bytes"]:
            found = f"has {info.size:,} bytes" if info.type == fs.FileType.File else "is missing"
            raise ConfigError(
                f"{folder.show(info.path)} {found}, where {DATASET} counts {file['bytes']:,} bytes. "
                "Prepare the data again: trainyard data prepare."
            )


def decode(
    table: pa.Table, info: DatasetInfo, *, threads: int | None = None
) -> dict[str, np.ndarray]:
    """Return the columns of `info.columns` as arrays whose first axis has the rows, and `id` (N,) int64.

    Raw values need no step per row, and are read-only if no copy was needed. Image files are decoded by
    `threads` threads, by default as many as torch has. Raises RunError with the row of a damaged image.
    """
    arrays = {name: _array(table, info, column, threads) for name, column in info.columns.items()}
    return arrays | {ID: table[ID].to_numpy()}


def _array(
    table: pa.Table, info: DatasetInfo, column: DataColumn, threads: int | None
) -> np.ndarray:
    if not column.shape:
        return table[column.stored].to_numpy()
    if column.is_encoded:
        return _decoded(table, info, threads)
    return _joined(table, column.bytes).reshape(-1, *column.shape)


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


def _joined(table: pa.Table, size: int) -> np.ndarray:
    """Return the bytes of all images as an array (N, size)."""
    values = table["image"].combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of no chunk at all
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.binary())
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != size)
    if len(wrong):
        raise RunError(
            f"image of {_where(table, wrong[0])} has {lengths[wrong[0]]:.0f} bytes where {size} are "
            f"right, and so have {len(wrong)} of {len(lengths)} rows."
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
