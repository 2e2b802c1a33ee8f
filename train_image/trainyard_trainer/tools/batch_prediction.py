"""Predict the classes of all images in Parquet files: read the rows, run the model, write the predictions.

Each input file becomes one output file with the same name and the same rows in the same order. It has all
columns except the images, and in addition:

    predicted     the most likely class
    probability   the probability of this class
    top           the most likely classes with their probabilities, if --top is more than 1
    error         why the image cannot be used; such a row has no prediction
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.image_codec import UnreadableError, load, to_png
from trainyard_trainer.data.prepared import METADATA_KEY, pixels_to_values
from trainyard_trainer.data.sources.listing import explained_errors, list_all
from trainyard_trainer.data.sources.pixel_columns import (
    NO_IMAGE,
    PixelLayout,
    find_layout,
    plain,
    to_pixels,
)
from trainyard_trainer.data.sources.tables import OPENING_THREADS, class_names_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools.classifier import Classifier

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
        layout = find_layout(filesystem, path, schema.field(image_column))
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


def answers_to(classifier: Classifier, rows: pa.Table, *, top: int, batch_size: int) -> pa.Table:
    """Return the number of each row and its prediction, for a table of `read_stretch`."""
    shape = classifier.info.shape
    layout = PixelLayout((classifier.info.bytes_per_sample,), shape, is_channel_last=False)
    pixels = np.asarray(to_pixels(rows["pixels"].combine_chunks(), layout).images)
    errors = rows["error"].to_pylist()
    is_good = np.array([error is None for error in errors], bool)
    good = pixels[is_good]
    found = (
        likeliest
        for start in range(0, len(good), batch_size)
        for likeliest in classifier(good[start : start + batch_size], top)
    )
    likeliest = [next(found) if each else None for each in is_good]
    return pa.table(
        {
            "row": rows["row"],
            "predicted": pa.array([each and each[0][0] for each in likeliest], pa.string()),
            "probability": pa.array([each and each[0][1] for each in likeliest], pa.float64()),
            "top": pa.array(
                [
                    each and [{"class": label, "probability": sure} for label, sure in each]
                    for each in likeliest
                ],
                pa.list_(CLASS_PROBABILITY),
            ),
            "error": rows["error"],
        }
    )


@dataclass(slots=True)
class Writer:
    """Write the output files one after the other, from predictions that arrive in the order of the rows."""

    inputs: Sequence[Input]
    filesystem: fs.FileSystem
    """The filesystem of the inputs."""
    out: RunFolder
    classes: tuple[str, ...]
    """The names of the model's classes."""
    top: int
    label_column: str
    rows: int = 0
    bad_rows: int = 0
    labelled_rows: int = 0
    """The number of rows with both a label and a prediction."""
    agreeing_rows: int = 0
    first_error: str = ""
    _held: list[pa.Table] = field(default_factory=list)
    _written: int = 0
    """The number of output files that are complete."""

    def add(self, answers: pa.Table) -> None:
        """Add the predictions of the next rows. Raises ValueError if they are not the next ones."""
        numbers = answers["row"].to_numpy()
        if not np.array_equal(numbers, np.arange(self.rows, self.rows + len(numbers))):
            raise ValueError(f"expected rows from {self.rows} on, got {numbers[:3]}")
        self.rows += len(numbers)
        self._held.append(answers.drop_columns(["row"]))
        self._write_complete_files()

    def finish(self) -> None:
        """Write the remaining files. Raises ValueError if rows are missing."""
        self._write_complete_files()
        if self._written < len(self.inputs):
            raise ValueError(
                f"predictions of rows of {self.inputs[self._written].name} are missing"
            )

    def _write_complete_files(self) -> None:
        ends = list(accumulate(file.rows for file in self.inputs))
        while self._written < len(ends) and self.rows >= ends[self._written]:
            held = pa.concat_tables(self._held) if self._held else ANSWER.empty_table()
            rows = self.inputs[self._written].rows
            self._write(self.inputs[self._written], held.slice(0, rows))
            self._held = [held.slice(rows)]
            self._written += 1

    def _write(self, file: Input, answers: pa.Table) -> None:
        added = ["predicted", "probability", *(["top"] if self.top > 1 else []), "error"]
        kept = file.other_columns
        fields = [file.schema.field(name) for name in kept]
        schema = pa.schema([*fields, *(ANSWER.field(name) for name in added)])
        start = 0
        with (
            explained_errors(file.path, "--data"),
            self.filesystem.open_input_file(file.path) as source,
            self.out.writing(f"{self.out.root}/{file.name}") as target,
            pq.ParquetWriter(target, schema) as writer,
        ):
            parquet = pq.ParquetFile(source)
            for group, rows in enumerate(file.group_rows):
                columns = parquet.read_row_group(group, columns=kept)
                part = answers.slice(start, rows)
                start += rows
                self._count(file, columns, part)
                arrays = [*(columns[name] for name in kept), *(part[name] for name in added)]
                writer.write_table(pa.table(arrays, schema=schema))

    def _count(self, file: Input, columns: pa.Table, answers: pa.Table) -> None:
        errors = answers["error"].drop_null()
        self.bad_rows += len(errors)
        if len(errors) and not self.first_error:
            self.first_error = f"{file.name}: {errors[0]}"
        if self.label_column in columns.column_names:
            labels = _names_of(
                columns[self.label_column], file.schema, self.label_column, self.classes
            )
            predicted = answers["predicted"].to_pylist()
            both = [pair for pair in zip(labels, predicted, strict=True) if None not in pair]
            self.labelled_rows += len(both)
            self.agreeing_rows += sum(label == name for label, name in both)


def _names_of(
    labels: pa.ChunkedArray, schema: pa.Schema, column: str, classes: tuple[str, ...]
) -> list[str | None]:
    """Return the names of the classes in a column of labels; None for a missing or unknown label.

    Integers are indices of the classes that the file's metadata lists, or else of the model's classes.
    """
    if pa.types.is_dictionary(labels.type):
        labels = labels.cast(labels.type.value_type)
    if not pa.types.is_integer(labels.type):
        return [label if isinstance(label, str) else None for label in labels.to_pylist()]
    header = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
    names = tuple(header.get("classes", ())) or class_names_of(schema, column) or classes
    return [
        names[label] if label is not None and 0 <= label < len(names) else None
        for label in labels.to_pylist()
    ]


def summary_of(writer: Writer, seconds: float) -> dict[str, Any]:
    """Return the counts and the speed as JSON. `agreement` is None if there are no labels."""
    share = writer.agreeing_rows / writer.labelled_rows if writer.labelled_rows else None
    return {
        "files": len(writer.inputs),
        "rows": writer.rows,
        "rows_without_prediction": writer.bad_rows,
        "labelled_rows": writer.labelled_rows,
        "agreement": None if share is None else round(share, 6),
        "seconds": round(seconds, 1),
        "rows_per_second": round(writer.rows / seconds, 1) if seconds else None,
    }


def summary_text(summary: dict[str, Any], label_column: str) -> str:
    """Return the summary as a few lines of text."""
    bad = summary["rows_without_prediction"]
    lines = [
        f"{summary['rows']:,} rows in {summary['seconds']:,} s, {summary['rows_per_second']:,} rows/s"
    ]
    if bad:
        lines.append(f"{bad:,} of them have no prediction: see their column `error`")
    if summary["agreement"] is not None:
        lines.append(
            f"agreement with column {label_column}: {summary['agreement']:.2%} of "
            f"{summary['labelled_rows']:,} rows"
        )
    return "\n".join(lines)
