"""Read images from Parquet files for a prediction: open the files, divide them, and decode the images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.image_codec import UnreadableError, load, to_png
from trainyard_trainer.data.prepared import METADATA_KEY
from trainyard_trainer.data.sources.images.pixel_columns import (
    NO_IMAGE,
    PixelLayout,
    find_layout,
    first_values,
    plain,
    to_pixels,
)
from trainyard_trainer.data.sources.images.tables import OPENING_THREADS
from trainyard_trainer.data.sources.listing import explained_errors, list_all
from trainyard_trainer.data.stored_rows import pixels_to_values
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

PART_BYTES = 2**24
"""The approximate number of bytes of pixels that are read at once."""

CLASS_PROBABILITY = pa.struct([("class", pa.string()), ("probability", pa.float64())])

ANSWER = pa.schema(
    [
        ("predicted", pa.string()),
        ("probability", pa.float64()),
        ("top", pa.list_(CLASS_PROBABILITY)),
        ("error", pa.string()),
    ]
)
"""The columns that a prediction adds to a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A Parquet file of images."""

    path: str
    """The path in the filesystem."""
    name: str
    """The path relative to the folder of the data set."""
    schema: pa.Schema
    image_column: str
    layout: PixelLayout | None
    """The layout of the pixels; None if the column contains encoded images."""
    group_rows: tuple[int, ...]
    """The number of rows of each row group."""

    @property
    def rows(self) -> int:
        """The number of rows of the file."""
        return sum(self.group_rows)

    @property
    def other_columns(self) -> list[str]:
        """The names of all columns except that of the images."""
        return [name for name in self.schema.names if name != self.image_column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive row groups of a file that one task reads."""

    file: int
    """The index of the file among the inputs."""
    first_group: int
    end_group: int
    first_row: int
    """The number of the first row in the whole data set."""


def open_inputs(
    path: str, endpoint: str | None, image_column: str, label_column: str | None = None
) -> list[Input]:
    """Return the Parquet files at a path in the order of their names.

    Raises ConfigError if there are none, or if one lacks the given columns.
    """
    filesystem, root = open_filesystem(path, endpoint, names=("--data", "--endpoint"))
    with explained_errors(path, "--data"):
        info = filesystem.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"--data = {path} does not exist.")
    found = [info] if info.type == fs.FileType.File else list_all(filesystem, root)
    files = [each.path for each in found if each.base_name.endswith(".parquet")]
    if not files:
        raise ConfigError(
            f"--data = {path} has no Parquet files. `trainyard data prepare` converts images to Parquet "
            "files."
        )
    above = root.rpartition("/")[0] if info.type == fs.FileType.File else root
    with ThreadPoolExecutor(OPENING_THREADS) as pool:
        inputs = list(pool.map(lambda file: _open(filesystem, above, file, image_column), files))
    for each in inputs:
        if label_column is not None and label_column not in each.schema.names:
            raise ConfigError(f"{each.path} has no column {label_column} (--label-column).")
    return inputs


def _open(filesystem: fs.FileSystem, root: str, path: str, image_column: str) -> Input:
    with explained_errors(path, "--data"), filesystem.open_input_file(path) as stream:
        file = pq.ParquetFile(stream)
        schema, metadata = file.schema_arrow, file.metadata
    if image_column not in schema.names:
        raise ConfigError(
            f"{path} has no column {image_column}; its columns are {', '.join(schema.names)}. "
            "Set --image-column to the column with the images."
        )
    if taken := [name for name in ANSWER.names if name in schema.names and name != image_column]:
        raise ConfigError(
            f"{path} already has a column {taken[0]}, which the predictions would add. Rename it."
        )
    header = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
    layout: PixelLayout | None = None
    if image_column == "image" and header.get("encoding") == "raw":
        channels, height, width = header["shape"]
        shape = (channels, height, width)
        layout = PixelLayout((channels * height * width,), shape, is_channel_last=False)
    elif metadata.num_rows:
        field = schema.field(image_column)
        layout = find_layout(path, field, lambda: first_values(filesystem, path, field))
    groups = range(metadata.num_row_groups)
    return Input(
        path=path,
        name=path.removeprefix(f"{root}/"),
        schema=schema,
        image_column=image_column,
        layout=layout,
        group_rows=tuple(metadata.row_group(group).num_rows for group in groups),
    )


def stretches_of(inputs: Sequence[Input], bytes_per_sample: int) -> Iterator[Stretch]:
    """Yield all row groups of the inputs, several small ones together."""
    first_row = 0
    wanted = max(1, PART_BYTES // bytes_per_sample)
    for number, file in enumerate(inputs):
        first_group = rows = 0
        for group, group_rows in enumerate(file.group_rows, start=1):
            rows += group_rows
            if rows and (rows >= wanted or group == len(file.group_rows)):
                yield Stretch(
                    file=number, first_group=first_group, end_group=group, first_row=first_row
                )
                first_row += rows
                first_group, rows = group, 0


def read_stretch(
    file: Input, stretch: Stretch, filesystem: fs.FileSystem, shape: tuple[int, int, int]
) -> Iterator[pa.Table]:
    """Yield tables with the number of each row, its pixels in the given shape, or an error."""
    size = int(np.prod(shape))
    row = stretch.first_row
    with explained_errors(file.path, "--data"), filesystem.open_input_file(file.path) as stream:
        batches = pq.ParquetFile(stream, pre_buffer=False, buffer_size=2**20).iter_batches(
            batch_size=max(1, PART_BYTES // size),
            row_groups=range(stretch.first_group, stretch.end_group),
            columns=[file.image_column],
        )
        for batch in batches:
            pixels, errors = _pixels_of(plain(batch.column(0)), file.layout, shape)
            rows = np.arange(row, row + len(pixels))
            row += len(pixels)
            yield pa.table(
                {
                    "row": rows,
                    "pixels": pixels_to_values(pixels),
                    "error": pa.array(errors, pa.string()),
                }
            )


def _pixels_of(
    values: pa.Array, layout: PixelLayout | None, shape: tuple[int, int, int]
) -> tuple[np.ndarray, list[str | None]]:
    """Return the images, (N, C, H, W) uint8, and for each the reason why it cannot be used, or None."""
    errors: list[str | None] = [None] * len(values)
    if layout is not None:
        read = to_pixels(values, layout)
        for place, problem in read.problems.items():
            errors[place] = problem
        images = np.asarray(read.images)
        if layout.shape == shape:
            return images, errors
        pictures: list[bytes | None] = [to_png(image) for image in images]
    else:
        pictures = values.to_pylist()
    pixels = np.zeros((len(values), *shape), np.uint8)
    for place, picture in enumerate(pictures):
        if errors[place] is not None:
            continue
        try:
            if picture:
                pixels[place] = load(picture, shape)
            else:
                errors[place] = NO_IMAGE
        except UnreadableError as reason:
            errors[place] = str(reason)
    return pixels, errors
