"""What every source of images offers: all labels at once, and the images of rows when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.parts import ALL, SampleLocation
from trainyard_trainer.errors import ConfigError


class ImageSource(NamedTuple):
    """Where a source of images lies, and how it is to be opened."""

    path: str
    """As a person wrote it."""
    filesystem: fs.FileSystem
    root: str
    """The file or folder on the file system; the names of splits and classes are those below it."""
    columns: ImageColumns
    say: Callable[[str], None]
    """Tells a person how the source is understood."""

    def tell_layout(self, shape: tuple[int, ...]) -> None:
        """Say in which order the sizes of a column of pixels are read."""
        sizes = " x ".join(map(str, shape))
        self.say(
            f"{self.path}: {self.columns.image} is read as pixels, {sizes}: channels, rows, columns"
        )


class ReadImages(NamedTuple):
    """Images of some rows, in the order in which they were asked for."""

    images: np.ndarray | list[bytes]
    """Pixels (n, C, H, W) uint8, or picture files; anything where there is a problem."""
    problems: dict[int, str]
    """Why an image is none, by its place among the rows."""


class Samples(Protocol):
    """One part of a source."""

    @property
    def labels(self) -> pa.Array:
        """Numbers (int64) or names (string), null where there is none."""

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        """(C, H, W) of a source of pixels; None for one of picture files."""

    @property
    def num_bytes(self) -> int | None:
        """About how many the images have; None if nobody knows."""

    @property
    def is_random_access(self) -> bool:
        """Any rows come as fast as rows side by side."""

    @property
    def problems(self) -> Mapping[int, str]:
        """Rows that are known to be no samples before their images are read."""

    def where(self, row: int) -> SampleLocation: ...

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A data set as it was found."""

    path: str
    """As a person wrote it."""
    kind: str
    """What it was found to be, in words."""
    splits: Mapping[str, Samples]
    """`train` and `valid`, or one of them, or `all`."""
    class_names: tuple[str, ...] | None = None
    """If the source has names for numbers."""
    stamp: str
    """Changes when the source does."""

    def part(self, name: str) -> Samples:
        """Raises ConfigError if the source has only other parts."""
        found = self.splits.get(name, self.splits.get(ALL))
        if found is None:
            raise ConfigError(
                f"{self.path} has only a part for {' and '.join(self.splits)}, and none for {name}."
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSamples:
    """Samples whose images are in memory."""

    labels: pa.Array
    images: np.ndarray | list[bytes]
    file: str
    problems: Mapping[int, str] = field(default_factory=dict)
    is_random_access: bool = True

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        return self.images.shape[1:] if isinstance(self.images, np.ndarray) else None

    @property
    def num_bytes(self) -> int:
        if isinstance(self.images, np.ndarray):
            return self.images.nbytes
        return sum(map(len, self.images))

    def where(self, row: int) -> SampleLocation:
        return SampleLocation(self.file, row, "image")

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        if isinstance(self.images, np.ndarray):
            return ReadImages(self.images[rows], {})
        return ReadImages([self.images[row] for row in rows], {})


@dataclass(frozen=True, slots=True)
class Cached:
    """Samples of a file that gives rows only one after the other, read into memory at once."""

    origin: Samples
    found: ReadImages

    @classmethod
    def of(cls, origin: Samples, pool: Executor) -> Cached:
        return cls(origin, origin.read(np.arange(len(origin.labels)), pool))

    @property
    def labels(self) -> pa.Array:
        return self.origin.labels

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        return self.origin.pixel_shape

    @property
    def num_bytes(self) -> int | None:
        return self.origin.num_bytes

    @property
    def is_random_access(self) -> bool:
        return True

    @property
    def problems(self) -> Mapping[int, str]:
        return self.origin.problems

    def where(self, row: int) -> SampleLocation:
        return self.origin.where(row)

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        images, problems = self.found
        bad = (
            {place: problems[row] for place, row in enumerate(rows.tolist()) if row in problems}
            if problems
            else {}
        )
        if isinstance(images, np.ndarray):
            return ReadImages(images[rows], bad)
        return ReadImages([images[row] for row in rows], bad)
