"""Predict the classes of all images in tables: run the model on the rows, and write the predictions.

Each table becomes one Parquet file with the same name and the same rows in the same order. It has all columns
except the images, and in addition:

    predicted     the most likely class
    probability   the probability of this class
    top           the most likely classes with their probabilities, if --top is more than 1
    error         why the image cannot be used; such a row has no prediction
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.prepared import METADATA_KEY
from trainyard_trainer.data.sources.images.pixel_columns import PixelLayout, to_pixels
from trainyard_trainer.data.sources.images.tables import class_names_of
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.prediction.classifier import Classifier
from trainyard_trainer.tools.prediction.prediction_input import ANSWER, CLASS_PROBABILITY, Input


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


@dataclass(kw_only=True)
class Counts:
    """The counts of a prediction over all rows, as the summary shows them."""

    rows: int = 0
    bad_rows: int = 0
    labelled_rows: int = 0
    """The number of rows with both a label and a prediction."""
    agreeing_rows: int = 0
    first_error: str = ""


@dataclass(kw_only=True)
class Writer(Counts):
    """Write the output files one after the other, from predictions that arrive in the order of the rows."""

    inputs: Sequence[Input]
    filesystem: fs.FileSystem
    """The filesystem of the inputs."""
    out: RunFolder
    classes: tuple[str, ...]
    """The names of the model's classes."""
    top: int
    label_column: str
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
            file.opened(self.filesystem) as table,
            self.out.writing(f"{self.out.root}/{file.name}") as target,
            pq.ParquetWriter(target, schema) as writer,
        ):
            for group, rows in enumerate(file.group_rows):
                columns = table.read_group(group, kept) if kept else pa.table({})
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


def summary_of(counts: Counts, seconds: float) -> dict[str, Any]:
    """Return the counts and the speed as JSON. `agreement` is None if there are no labels."""
    share = counts.agreeing_rows / counts.labelled_rows if counts.labelled_rows else None
    return {
        "rows": counts.rows,
        "rows_without_prediction": counts.bad_rows,
        "labelled_rows": counts.labelled_rows,
        "agreement": None if share is None else round(share, 6),
        "seconds": round(seconds, 1),
        "rows_per_second": round(counts.rows / seconds, 1) if seconds else None,
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
