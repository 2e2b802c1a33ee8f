"""Data sets of Lance with images: image files as bytes or blobs, or pixels as bytes, lists or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from trainyard_trainer.data.sources.column_types import Use, require_use, to_labels
from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.images.pixel_columns import (
    SNIFFED_ROWS,
    PixelLayout,
    find_layout,
    plain,
)
from trainyard_trainer.data.sources.images.samples import ImageSource, ReadImages, Source
from trainyard_trainer.data.sources.images.tables import (
    check_same,
    class_names_of,
    in_given_order,
    in_one,
    split_files,
)
from trainyard_trainer.data.sources.lance_datasets import LanceTable, open_dataset
from trainyard_trainer.data.sources.parts import SampleLocation, stamp_of
from trainyard_trainer.errors import ConfigError


class LanceImages(NamedTuple):
    """A data set of Lance, and the labels of its images."""

    path: str
    table: LanceTable
    labels: pa.Array
    image_field: pa.Field
    class_names: tuple[str, ...] | None


def open_lance(
    source: ImageSource, folders: Sequence[str], *, version: str | None, endpoint: str | None
) -> Source:
    """Open the data sets of Lance of a source of images.

    Each is read at `version`, or at its newest one. Data sets without rows are left out. Raises ConfigError
    if one is damaged, lacks a column, or has a column of a wrong type.
    """
    opened = [_open(source, folder, version, endpoint) for folder in folders]
    found = [each for each in opened if each.table.num_rows]
    if not found:
        raise ConfigError(f"{source.path} has no rows: the data set of Lance is empty.")
    first = found[0]
    for each in found:
        check_same(source.columns.image, first, first.image_field.type, each, each.image_field.type)
        check_same(source.columns.label, first, first.labels.type, each, each.labels.type)
    layout = find_layout(
        first.path, first.image_field, lambda: first_images(first.table, first.image_field.name)
    )
    if layout and len(layout.stored) == 1:
        source.tell_layout(layout.shape)
    for each in found:
        source.say(f"{each.path}: version {each.table.version.number} of the data set is read")
    named = split_files(source.path, source.root, found, source.say)
    return Source(
        path=source.path,
        kind=f"data sets of Lance with {'pixels' if layout else 'pictures'}",
        splits={
            name: LanceSamples(source.root, tuple(chosen), source.columns.image, layout)
            for name, chosen in named.items()
        },
        class_names=first.class_names,
        stamp=stamp_of([(each.path, each.table.version) for each in found]),
    )


def _open(
    source: ImageSource, folder: str, version: str | None, endpoint: str | None
) -> LanceImages:
    image_column, label_column = source.columns
    dataset = open_dataset(source.filesystem, folder, folder, endpoint=endpoint, version=version)
    table = LanceTable(source.filesystem, dataset, folder, folder)
    schema = table.schema
    check_columns(folder, schema.names, *source.columns)
    require_use(folder, schema.field(label_column), Use.IMAGE)
    labels = to_labels(table.column(label_column), folder, label_column)
    return LanceImages(
        path=folder,
        table=table,
        labels=in_one(labels),
        image_field=schema.field(image_column),
        class_names=class_names_of(schema, label_column),
    )


def first_images(table: LanceTable, image_column: str) -> list:
    """Return the first images that are not null, as Python values."""
    column = table.first(SNIFFED_ROWS, [image_column]).column(0)
    values = [value for chunk in column.chunks for value in plain(chunk).to_pylist()]
    return [value for value in values if value is not None]


@dataclass(slots=True)
class LanceSamples:
    """The samples of data sets of Lance. Rows in ascending order are read fastest: a group is held."""

    root: str
    sources: tuple[LanceImages, ...]
    column: str
    layout: PixelLayout | None
    is_random_access: bool = False
    problems: dict[int, str] = field(default_factory=dict)
    labels: pa.Array = field(init=False)
    num_bytes: int = field(init=False)
    _ends: np.ndarray = field(init=False)
    """The number of the row behind each data set."""
    _groups: list[tuple[LanceTable, int]] = field(init=False)
    _group_ends: np.ndarray = field(init=False)
    """The number of the row behind each group of all data sets."""
    _held: tuple[int, pa.Array] | None = field(init=False, default=None)
    """The number of the group that was read last, and its images."""

    def __post_init__(self) -> None:
        tables = [each.table for each in self.sources]
        self.labels = pa.concat_arrays([each.labels for each in self.sources])
        self.num_bytes = int(sum(table.group_bytes.sum() for table in tables))
        self._ends = np.cumsum([table.num_rows for table in tables])
        self._groups = [
            (table, group) for table in tables for group in range(len(table.group_ends))
        ]
        starts = self._ends - [table.num_rows for table in tables]
        self._group_ends = np.concatenate(
            [start + table.group_ends for start, table in zip(starts, tables, strict=True)]
        )

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        return self.layout.shape if self.layout else None

    def where(self, row: int) -> SampleLocation:
        number = int(np.searchsorted(self._ends, row, side="right"))
        source = self.sources[number]
        start = int(self._ends[number]) - source.table.num_rows
        name = source.path.removeprefix(f"{self.root}/")
        return SampleLocation(PurePosixPath(name).name if name == self.root else name, row - start)

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        owners = np.searchsorted(self._group_ends, ascending, side="right")
        pieces = []
        for owner in np.unique(owners).tolist():
            first = int(self._group_ends[owner - 1]) if owner else 0
            pieces.append(self._images_of(owner).take(pa.array(ascending[owners == owner] - first)))
        return in_given_order(pa.concat_arrays(pieces), order, self.layout)

    def _images_of(self, number: int) -> pa.Array:
        if self._held is None or self._held[0] != number:
            self._held = None  # so that two groups are never in memory
            table, group = self._groups[number]
            found = table.read_group(group, [self.column]).column(0)
            self._held = number, plain(in_one(found))
        return self._held[1]
