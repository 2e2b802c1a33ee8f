"""How a data set will lie in Parquet, by its options and the first of its images."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trainyard_trainer.data.preparation.convert import Form, convert
from trainyard_trainer.data.sources.samples import Samples
from trainyard_trainer.errors import ConfigError

FILE_BYTES = (4 * 2**20, 128 * 2**20)
"""A file has at least and at most about so many, and between them a sixteenth of its split."""
NUM_FILES = 16

RAW_SIDE = 64
"""Pictures are kept as pixels up to this height and width: they take hardly more space, and no decoding."""

PROBED = 64
"""So many images tell the shape of all, and about how many bytes one has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """All that decides about the bytes of a prepared data set."""

    source: str
    valid_source: str | None = None
    valid_share: float = 0.2
    image_column: str = "image"
    label_column: str = "label"
    size: int | None = None
    """Height and width to which all images are brought."""
    fallback_size: int | None = None
    """The same for pictures that have not all one shape, or are too large to be kept as pixels."""
    channels: int | None = None
    encoding: Literal["auto", "raw", "encoded"] = "auto"
    num_classes: int | None = None
    seed: int = 0
    """Of the split and of the order."""
    row_bytes: int | None = None
    """Of text, which becomes rows of so many bytes; None for images."""
    text_files: str | None = None
    """Which files of a folder are text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """`train` or `valid`, as it will be."""

    name: str
    samples: Samples
    labels: np.ndarray
    """Of all rows of the source, (N,) int64."""
    order: np.ndarray
    """Rows of the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What follows from source and options."""

    form: Form
    classes: tuple[str, ...]
    rows_per_file: dict[str, int]
    """Of each part."""
    rows_per_run: dict[str, int]
    """Of a part that is spilled; see spill.py."""

    @classmethod
    def of_json(cls, known: dict[str, Any]) -> Plan:
        form = known["form"] | {"shape": tuple(known["form"]["shape"])}
        return cls(**known | {"form": Form(**form), "classes": tuple(known["classes"])})


def make_plan(
    options: Options,
    classes: tuple[str, ...],
    parts: list[Part],
    pool: Executor,
    memory_bytes: int,
) -> Plan:
    """Raises ConfigError if the images cannot be brought to one shape."""
    form = _choose_form(options, parts[0], pool)
    return Plan(
        form=form,
        classes=classes,
        rows_per_file={part.name: _rows_per_file(part, form, pool) for part in parts},
        rows_per_run={
            part.name: _rows_per_run(part, memory_bytes)
            for part in parts
            if not part.samples.is_random_access and (part.samples.num_bytes or 0) > memory_bytes
        },
    )


def _choose_form(options: Options, part: Part, pool: Executor) -> Form:
    """Raises ConfigError if images of several shapes are to have one and nobody says which."""
    look = look_at_first(part.samples, pool)
    is_small = look.size is not None and max(look.size) <= RAW_SIDE
    wanted = options.size
    if not wanted and not look.is_pixels and not is_small:
        wanted = options.fallback_size
    size = (wanted, wanted) if wanted else look.size
    if size is None:
        raise ConfigError(
            f"{options.source}: pictures have several shapes: {look.difference}.\n"
            "       Say by --size to which height and width they shall be brought, such as --size 224."
        )
    is_raw = look.is_pixels or max(size) <= RAW_SIDE
    encoding = options.encoding if options.encoding != "auto" else "raw" if is_raw else "encoded"
    return Form(
        shape=(options.channels or look.channels, *size),
        encoding=encoding,
        is_fitted=bool(wanted),
    )


class Look(NamedTuple):
    """What the first images are like."""

    is_pixels: bool
    channels: int
    size: tuple[int, int] | None
    """Height and width, if all have the same."""
    difference: str = ""
    """Two that have not."""


def look_at_first(samples: Samples, pool: Executor) -> Look:
    """Raises ConfigError if none of them is an image."""
    if samples.pixel_shape is not None:
        channels, height, width = samples.pixel_shape
        return Look(True, channels, (height, width))
    # Only pictures need torch.
    from trainyard_trainer.data.image_codec import UnreadableError, read_header

    rows = _probed_rows(samples)
    images, problems = samples.read(rows, pool)
    seen = []
    for place, row in enumerate(rows.tolist()):
        try:
            if place not in problems:
                seen.append((read_header(images[place]), samples.where(row)))
        except UnreadableError as error:
            problems[place] = f"it cannot be decoded: {error}"
    if not seen:
        place, reason = min(problems.items())
        raise ConfigError(
            f"none of {len(rows)} pictures can be used. {samples.where(int(rows[place]))}: {reason}"
        )
    first, its_place = seen[0]
    for header, its_other_place in seen:
        if (header.height, header.width) != (first.height, first.width):
            difference = (
                f"{its_place} is {first.height} x {first.width}, "
                f"{its_other_place} is {header.height} x {header.width}"
            )
            return Look(False, first.channels, None, difference)
    return Look(False, first.channels, (first.height, first.width))


def _probed_rows(samples: Samples) -> np.ndarray:
    """Rows spread over all, or the first ones where others are far away."""
    count = len(samples.labels)
    if samples.is_random_access:
        return np.unique(np.linspace(0, count - 1, min(count, PROBED)).astype(int))
    return np.arange(min(count, PROBED))


def _rows_per_run(part: Part, memory_bytes: int) -> int:
    """As many as fill half of the memory: they are there twice while they are put in order."""
    bytes_per_row = (part.samples.num_bytes or 0) / len(part.samples.labels)
    return max(1, int(memory_bytes / 2 / bytes_per_row))


def _rows_per_file(part: Part, form: Form, pool: Executor) -> int:
    bytes_per_row = float(np.prod(form.shape))
    if form.encoding == "encoded":
        found = convert(part.samples, _probed_rows(part.samples), form, pool)
        bytes_per_row = found.values.nbytes / max(len(found.values), 1) or bytes_per_row
    file_bytes = np.clip(bytes_per_row * len(part.order) / NUM_FILES, *FILE_BYTES)
    return max(1, int(file_bytes / bytes_per_row))
