"""Read images from tables for a prediction: open the tables, divide them, and decode the images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.image_codec import UnreadableError, load, to_png
from trainyard_trainer.data.prepared import METADATA_KEY
from trainyard_trainer.data.sources.images.pixel_columns import (
    NO_IMAGE,
    PixelLayout,
    find_layout,
    plain,
    to_pixels,
)
from trainyard_trainer.data.sources.images.tables import OPENING_THREADS
from trainyard_trainer.data.sources.lance_datasets import LanceVersion
from trainyard_trainer.data.sources.parquet_files import SUFFIX
from trainyard_trainer.data.sources.rows.readers import FORMATS, RowFormat
from trainyard_trainer.data.sources.rows.split_files import SourceFile, SplitFiles, find_files
from trainyard_trainer.data.stored_rows import pixels_to_values
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.tools.prediction.image_tables import ImageTable, opened_table

KEYS = ("--data", "--endpoint")
"""What names the tables and their S3 server, for messages."""

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
    """A table of images: a file, or a version of a data set of Lance."""

    path: str
    """The path in the filesystem."""
    shown: str
    """The path as messages show it."""
    endpoint: str | None
    """The address of the S3 server, if that is not AWS."""
    version: LanceVersion | None
    """The version of a data set of Lance; None for a file."""
    form: RowFormat
    name: str
    """The path of the predictions relative to their folder: that of the table in the data set."""
    schema: pa.Schema
    image_column: str
    layout: PixelLayout | None
    """The layout of the pixels; None if the column contains encoded images."""
    group_rows: tuple[int, ...]
    """The number of rows of each group that is read at once, such as a row group of Parquet."""

    def opened(self, filesystem: fs.FileSystem) -> AbstractContextManager[ImageTable]:
        """Open the table for a while."""
        file = SourceFile(filesystem, self.path, self.shown, self.endpoint, self.version)
        return opened_table(file, self.form)

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return sum(self.group_rows)

    @property
    def other_columns(self) -> list[str]:
        """The names of all columns except that of the images."""
        return [name for name in self.schema.names if name != self.image_column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive groups of rows of a table that one task reads."""

    file: int
    """The index of the table among the inputs."""
    first_group: int
    end_group: int
    first_row: int
    """The number of the first row in the whole data set."""


def open_inputs(
    path: str, endpoint: str | None, image_column: str, label_column: str | None = None
) -> list[Input]:
    """Return the tables of images at a path in the order of their names.

    Raises ConfigError if there are none, or if one lacks the given columns.
    """
    found = find_files(path, endpoint, FORMATS, kind="table of images", keys=KEYS, reads_tests=True)
    with ThreadPoolExecutor(OPENING_THREADS) as pool:
        inputs = list(pool.map(lambda file: _open(found, file, image_column), found.files))
    for each in inputs:
        if label_column is not None and label_column not in each.schema.names:
            raise ConfigError(f"{each.path} has no column {label_column} (--label-column).")
    return inputs


def _open(found: SplitFiles, path: str, image_column: str) -> Input:
    file = found.file(path)
    above = found.root.rpartition("/")[0] if path == found.root else found.root
    assert isinstance(found.form, RowFormat)
    with opened_table(file, found.form) as table:
        _check_columns(path, table.schema.names, image_column)
        schema, group_rows = table.schema, table.group_rows
        layout = _layout_of(path, table, image_column)
    name = path.removeprefix(f"{above}/")
    return Input(
        path=path,
        shown=file.shown,
        endpoint=file.endpoint,
        version=file.version,
        form=found.form,
        name=str(PurePosixPath(name).with_suffix(SUFFIX)),
        schema=schema,
        image_column=image_column,
        layout=layout,
        group_rows=group_rows,
    )


def _check_columns(path: str, names: Sequence[str], image_column: str) -> None:
    """Raise ConfigError if a table lacks the images, or has a column that predictions would add."""
    if image_column not in names:
        raise ConfigError(
            f"{path} has no column {image_column}; its columns are {', '.join(names)}. "
            "Set --image-column to the column with the images."
        )
    if taken := [name for name in ANSWER.names if name in names and name != image_column]:
        raise ConfigError(
            f"{path} already has a column {taken[0]}, which the predictions would add. Rename it."
        )


def _layout_of(path: str, table: ImageTable, image_column: str) -> PixelLayout | None:
    """Return the layout of the pixels of a table; None if its images are encoded, or if it has none."""
    header = json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    if image_column == "image" and header.get("encoding") == "raw":
        channels, height, width = header["shape"]
        shape = (channels, height, width)
        return PixelLayout((channels * height * width,), shape, is_channel_last=False)
    if not sum(table.group_rows):
        return None
    field = table.schema.field(image_column)
    return find_layout(path, field, lambda: table.first_values(field))


def stretches_of(inputs: Sequence[Input], bytes_per_sample: int) -> Iterator[Stretch]:
    """Yield all groups of rows of the inputs, several small ones together."""
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
    with file.opened(filesystem) as table:
        batches = table.batches(
            range(stretch.first_group, stretch.end_group),
            file.image_column,
            max(1, PART_BYTES // size),
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
