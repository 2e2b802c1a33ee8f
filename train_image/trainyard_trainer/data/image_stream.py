"""Images with labels that are streamed: image files in Parquet or in tar shards, decoded in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.image_codec import (
    EXTENSIONS,
    Header,
    UnreadableError,
    load,
    read_header,
)
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.stream_order import Stream, StreamOrder
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.data.sources.lance_datasets import LanceVersion
from trainyard_trainer.data.sources.rows.find_rows import TableSplit, open_table
from trainyard_trainer.data.sources.rows.split_files import SplitName
from trainyard_trainer.errors import ConfigError, DatasetError

SMALL_SIDE = 64
"""Images of one size up to this height and width keep it, as a preparation keeps it."""

SMALLEST_STD = 1e-6

PROBED_GROUPS = 8
"""The number of groups of rows whose first images decide the shape, the mean and the standard deviation."""

PROBED_IMAGES = 32
"""The number of images that are read of each of these groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStream(Stream):
    """A data set of images that is read from its source while a run trains."""

    info: DatasetInfo
    options: Mapping[str, Any]
    """The arguments of `open_table` beside the split."""
    image_column: str
    label_column: str
    num_train: int
    num_valid: int
    order: StreamOrder
    bad_samples: int = 0
    """Always 0: an image that cannot be read ends the run."""

    @property
    def images(self) -> DatasetInfo:
        return self.info

    @property
    def versions(self) -> Mapping[str, LanceVersion]:
        """The versions of the data sets of Lance that are read, by their addresses."""
        found: Mapping[str, LanceVersion] = self.options["versions"]
        return found

    def open(self, split: SplitName) -> TableSplit:
        """Open a split in this process."""
        return open_table(split=split, **self.options)

    def open_rows(self, split: SplitName) -> ImageRows:
        return ImageRows(self, split)


def open_image_stream(
    data: Data,
    *,
    storage_endpoint: str | None,
    seed: int,
    model: Model,
    versions: Mapping[str, LanceVersion] | None = None,
) -> ImageStream:
    """Open a source of images as a stream. Raises ConfigError if it cannot be one.

    `versions` are those of data sets of Lance that the run has read before, by their addresses.
    """
    options: dict[str, Any] = {
        "source": absolute(data.source),
        "valid_source": absolute(data.valid_source) if data.valid_source else None,
        "endpoint": data.endpoint or storage_endpoint,
        "columns": None,
        "valid_share": data.valid_share,
        "seed": seed,
        "groups_at_once": data.stream_groups,
        "versions": versions,
    }
    train = open_table(split="train", **options)
    image, label = options["columns"] = _columns_of(train, data)
    options["versions"] = {**(versions or {}), **train.versions}
    valid = open_table(split="valid", **options)
    options["versions"] |= valid.versions
    classes = _classes_of(train, label, model.num_classes)
    images = _probe(train, image, seed)
    shape = (model.in_channels, *_size_of(images, model.image_size))
    mean, std = _statistics(images, shape)
    return ImageStream(
        info=DatasetInfo(
            source=options["source"],
            shape=shape,
            encoding="encoded",
            classes=classes,
            mean=mean,
            std=std,
        ),
        options=options,
        image_column=image,
        label_column=label,
        num_train=len(train),
        num_valid=len(valid),
        order=StreamOrder.of_table(train, data.stream_groups),
    )


class ImageRows(Dataset[Batch]):
    """A split of a stream of images whose items are whole batches. It is pickled without its files."""

    def __init__(self, data: ImageStream, split: SplitName) -> None:
        self.data = data
        self.split = split
        self._labels = {name: label for label, name in enumerate(data.info.classes)}
        self._table: TableSplit | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}

    def __len__(self) -> int:
        return self.data.num_train if self.split == "train" else self.data.num_valid

    def __getitem__(self, indices: np.ndarray) -> Batch:
        if self._table is None:
            self._table = self.data.open(self.split)
        ids = torch.from_numpy(np.asarray(indices, np.int64))
        if not len(ids):
            images, labels = torch.empty((0, *self.data.info.shape), dtype=torch.uint8), ids
            return Batch({"image": images, "label": labels}, ids)
        samples = self._table.read(indices)
        files, values = samples[self.data.image_column], samples[self.data.label_column]
        columns = {
            "image": torch.stack(
                [torch.from_numpy(self._image(*each)) for each in zip(files, indices, strict=True)]
            ),
            "label": torch.tensor(
                [self._label(*each) for each in zip(values, indices, strict=True)]
            ),
        }
        return Batch(columns, ids)

    def _image(self, file: bytes, index: int) -> np.ndarray:
        try:
            return load(file, self.data.info.shape)
        except UnreadableError as error:
            raise DatasetError(
                f"{self._where(index)}: the image cannot be decoded: {error}. Remove the row, or prepare the "
                "data (without data.stream), which leaves out up to data.max_bad_samples."
            ) from None

    def _label(self, value: Any, index: int) -> int:
        is_name = isinstance(value, str)
        label = self._labels.get(value, -1) if is_name else int(value)
        if not 0 <= label < len(self._labels):
            raise DatasetError(
                f"{self._where(index)}: the label {value} is none of the {len(self._labels)} classes"
            )
        return label

    def _where(self, index: int) -> str:
        assert self._table is not None
        return f"{self.data.info.source}, row {self._table.indices[index]}"


def _columns_of(table: TableSplit, data: Data) -> tuple[str, str]:
    """Return the columns of the images and of the labels. Raises ConfigError if they are not there.

    A tar shard has the column `cls`, and one that is named for the format of the images, such as `jpg`.
    """
    columns = table.columns
    image, label = data.image_column, data.label_column
    formats = [name for name in columns if f".{name}" in EXTENSIONS]
    if image == "image" and image not in columns and len(formats) == 1:
        image = formats[0]
    if label == "label" and label not in columns and "cls" in columns:
        label = "cls"
    for key, name in (("image_column", image), ("label_column", label)):
        if name not in columns:
            raise ConfigError(
                f"data.source = {data.source} has no column {name}, but {', '.join(columns)}: set data.{key}"
            )
    return image, label


def _classes_of(table: TableSplit, label: str, num_classes: int) -> tuple[str, ...]:
    """Return the names of the classes: those of the labels if they are text, else numbers.

    Names are found by reading the column of the labels. Raises ConfigError if there are not `num_classes`.
    """
    kind = table.rows.columns[label]
    if "string" not in kind:
        return tuple(map(str, range(num_classes)))
    names: set[str] = set()
    start = 0
    for size in table.group_rows:
        names.update(table.rows.read(table.indices[start : start + size], [label])[label])
        start += size
    if len(names) != num_classes:
        raise ConfigError(
            f"train.model.num_classes = {num_classes}, but the data has {len(names)} classes. "
            f"Use {len(names)}."
        )
    return tuple(sorted(names))


def _probe(table: TableSplit, image: str, seed: int) -> list[tuple[bytes, Header]]:
    """Return the first images of a few groups of rows. Raises ConfigError if they are no image files."""
    starts = np.cumsum(table.group_rows) - np.asarray(table.group_rows)
    count = min(PROBED_GROUPS, len(starts))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(starts))[:count])
    images = []
    for group in chosen.tolist():
        first = int(starts[group])
        size = min(PROBED_IMAGES, table.group_rows[group])
        files = table.rows.read(table.indices[first : first + size], [image])[image]
        for place, data in enumerate(files):
            where = f"{table.rows.path}, row {table.indices[first + place]}"
            if not isinstance(data, bytes):
                raise ConfigError(
                    f"{where}: column {image} has {table.rows.columns[image]}, and data.stream reads image "
                    "files (bytes). Prepare pixels: leave data.stream out."
                )
            try:
                images.append((data, read_header(data)))
            except UnreadableError as error:
                raise ConfigError(f"{where}: the image cannot be decoded: {error}") from None
    return images


def _size_of(images: list[tuple[bytes, Header]], image_size: int) -> tuple[int, int]:
    """Return height and width: those of small images of one size, else those of the model."""
    sizes = {(header.height, header.width) for _, header in images}
    size = next(iter(sizes))
    return size if len(sizes) == 1 and max(size) <= SMALL_SIDE else (image_size, image_size)


def _statistics(
    images: list[tuple[bytes, Header]], shape: tuple[int, int, int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, with pixels from 0 to 1."""
    pixels = np.stack([load(data, shape, header) for data, header in images]) / 255
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3))
    return tuple(mean.tolist()), tuple(np.maximum(std, SMALLEST_STD).tolist())
