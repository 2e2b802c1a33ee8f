"""The plan of a preparation: the format of the images and the number of rows per file."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trainyard_trainer.data.preparation.convert import StoredFormat, convert
from trainyard_trainer.data.sources.images.samples import Samples
from trainyard_trainer.errors import ConfigError

FILE_BYTES = (4 * 2**20, 128 * 2**20)
"""The smallest and the largest size of a file, about."""

NUM_FILES = 16
"""The number of files of a split whose files are between these sizes."""

RAW_SIDE = 64
"""Image files up to this height and width are stored as pixels: that needs little more space and no
decoding."""

PROBED = 64
"""The number of images from which the shape of all and the size of one are estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options that determine the bytes of a prepared data set."""

    source: str
    valid_source: str | None = None
    valid_share: float = 0.2
    image_column: str = "image"
    label_column: str = "label"
    size: int | None = None
    """The height and width to which all images are cropped and resized."""
    fallback_size: int | None = None
    """The same, for image files that differ in shape or are too large to be stored as pixels."""
    channels: int | None = None
    encoding: Literal["auto", "raw", "encoded"] = "auto"
    num_classes: int | None = None
    seed: int = 0
    """The seed of the split and of the order."""
    row_bytes: int | None = None
    """The number of bytes of a row of text; None for images."""
    text_files: str | None = None
    """The pattern of the names of text files in a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSplit:
    """The samples of `train` or `valid`, in the order of the prepared files."""

    name: str
    samples: Samples
    labels: np.ndarray
    """The labels of all rows of the source, (N,) int64."""
    order: np.ndarray
    """The rows of the source, in the order of the prepared files, (M,) int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparationPlan:
    """What a preparation decides at its beginning, and keeps when it resumes."""

    form: StoredFormat
    classes: tuple[str, ...]
    rows_per_file: dict[str, int]
    """The number of rows of each Parquet file, by split."""
    rows_per_chunk: dict[str, int]
    """The number of rows of each sorted chunk, by split; see external_shuffle.py. Other splits need no
    chunks."""

    @classmethod
    def of_json(cls, plan: dict[str, Any]) -> PreparationPlan:
        form = plan["form"] | {"shape": tuple(plan["form"]["shape"])}
        return cls(**plan | {"form": StoredFormat(**form), "classes": tuple(plan["classes"])})


def make_plan(
    options: Options,
    classes: tuple[str, ...],
    parts: list[PlannedSplit],
    pool: Executor,
    memory_bytes: int,
) -> PreparationPlan:
    """Make the plan. Raises ConfigError if the images differ in shape and no size was given."""
    form = _choose_format(options, parts[0], pool)
    return PreparationPlan(
        form=form,
        classes=classes,
        rows_per_file={part.name: _rows_per_file(part, form, pool) for part in parts},
        rows_per_chunk={
            part.name: _rows_per_chunk(part, memory_bytes)
            for part in parts
            if not part.samples.is_random_access and (part.samples.num_bytes or 0) > memory_bytes
        },
    )


def _choose_format(options: Options, part: PlannedSplit, pool: Executor) -> StoredFormat:
    """Choose the stored format. Raises ConfigError if the images differ in shape and no size was given."""
    found = detect_format(part.samples, pool)
    is_small = found.size is not None and max(found.size) <= RAW_SIDE
    wanted = options.size
    if not wanted and not found.is_pixels and not is_small:
        wanted = options.fallback_size
    size = (wanted, wanted) if wanted else found.size
    if size is None:
        raise ConfigError(
            f"{options.source}: images have several shapes: {found.difference}.\n"
            "       Choose the height and width of all images with --size, such as --size 224."
        )
    is_raw = found.is_pixels or max(size) <= RAW_SIDE
    encoding = options.encoding if options.encoding != "auto" else "raw" if is_raw else "encoded"
    return StoredFormat(
        shape=(options.channels or found.channels, *size),
        encoding=encoding,
        is_fitted=bool(wanted),
    )


class ImageFormat(NamedTuple):
    """The format of the first images of a source."""

    is_pixels: bool
    channels: int
    size: tuple[int, int] | None
    """Height and width, if all of them have the same."""
    difference: str = ""
    """Two images of different sizes, for an error message."""


def detect_format(samples: Samples, pool: Executor) -> ImageFormat:
    """Return the format of the first images. Raises ConfigError if none of them can be used."""
    if samples.pixel_shape is not None:
        channels, height, width = samples.pixel_shape
        return ImageFormat(True, channels, (height, width))
    # Only image files need torch.
    from trainyard_trainer.data.image_codec import UnreadableError, read_header

    rows = _probed_rows(samples)
    images, problems = samples.read(rows, pool)
    seen = []
    for index, row in enumerate(rows.tolist()):
        try:
            if index not in problems:
                seen.append((read_header(images[index]), samples.where(row)))
        except UnreadableError as error:
            problems[index] = f"it cannot be decoded: {error}"
    if not seen:
        index, reason = min(problems.items())
        raise ConfigError(
            f"none of {len(rows)} images can be used. {samples.where(int(rows[index]))}: {reason}"
        )
    first, first_location = seen[0]
    for header, location in seen:
        if (header.height, header.width) != (first.height, first.width):
            difference = (
                f"{first_location} is {first.height} x {first.width}, "
                f"{location} is {header.height} x {header.width}"
            )
            return ImageFormat(False, first.channels, None, difference)
    return ImageFormat(False, first.channels, (first.height, first.width))


def _probed_rows(samples: Samples) -> np.ndarray:
    """Return rows spread evenly over all, or the first rows of a source without random access."""
    count = len(samples.labels)
    if samples.is_random_access:
        return np.unique(np.linspace(0, count - 1, min(count, PROBED)).astype(int))
    return np.arange(min(count, PROBED))


def _rows_per_chunk(part: PlannedSplit, memory_bytes: int) -> int:
    """Return the number of rows that fill half of the memory: they are there twice while they are sorted."""
    bytes_per_row = (part.samples.num_bytes or 0) / len(part.samples.labels)
    return max(1, int(memory_bytes / 2 / bytes_per_row))


def _rows_per_file(part: PlannedSplit, form: StoredFormat, pool: Executor) -> int:
    bytes_per_row = float(np.prod(form.shape))
    if form.encoding == "encoded":
        found = convert(part.samples, _probed_rows(part.samples), form, pool)
        bytes_per_row = found.values.nbytes / max(len(found.values), 1) or bytes_per_row
    file_bytes = np.clip(bytes_per_row * len(part.order) / NUM_FILES, *FILE_BYTES)
    return max(1, int(file_bytes / bytes_per_row))
