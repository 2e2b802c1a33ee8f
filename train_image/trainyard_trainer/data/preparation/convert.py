"""Images as a source has them -> images as a prepared data set keeps them, each one decoded and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from trainyard_trainer.data.prepared import pixels_to_values
from trainyard_trainer.data.sources.samples import Samples

PICTURES_AT_ONCE = 128
"""Picture files in memory, as they come."""

LUMA = (19595, 38470, 7471)
"""Of red, green and blue in grey, by 2**16: ITU-R 601, as all picture libraries have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a prepared data set keeps its images."""

    shape: tuple[int, int, int]
    encoding: Literal["raw", "encoded"]
    is_fitted: bool
    """Images of other sizes are made to fit, and larger pictures kept so; else each must have that size."""


class Sums(NamedTuple):
    """What mean and spread follow from, exactly, in whatever order it is added up."""

    pixels: int
    """Of each channel."""
    total: tuple[int, ...]
    squares: tuple[int, ...]

    @classmethod
    def of(cls, pixels_NCHW: np.ndarray) -> Sums:
        count, channels, height, width = pixels_NCHW.shape
        flat = pixels_NCHW.reshape(count, channels, height * width)
        total, squares = np.zeros((2, channels), np.uint64)
        # A few images at a time: their squares stay in the processor's cache.
        for start in range(0, count, 256):
            some = flat[start : start + 256]
            total += some.sum(axis=2, dtype=np.uint64).sum(axis=0)
            squares += np.square(some, dtype=np.uint16).sum(axis=2, dtype=np.uint64).sum(axis=0)
        return cls(count * height * width, tuple(total.tolist()), tuple(squares.tolist()))

    @classmethod
    def none(cls, channels: int) -> Sums:
        return cls(0, (0,) * channels, (0,) * channels)

    @classmethod
    def of_json(cls, known: list) -> Sums:
        pixels, total, squares = known
        return cls(pixels, tuple(total), tuple(squares))

    def plus(self, other: Sums) -> Sums:
        return Sums(
            self.pixels + other.pixels,
            tuple(map(sum, zip(self.total, other.total, strict=True))),
            tuple(map(sum, zip(self.squares, other.squares, strict=True))),
        )

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, with pixels from 0 to 1."""
        return tuple(total / (255 * self.pixels) for total in self.total)

    @property
    def spread(self) -> tuple[float, ...]:
        """Standard deviation."""
        return tuple(
            (self.pixels * squares - total**2) ** 0.5 / (255 * self.pixels)
            for total, squares in zip(self.total, self.squares, strict=True)
        )


class Converted(NamedTuple):
    """Images of some rows."""

    places: np.ndarray
    """Of the images that are good, among the rows that were asked for."""
    values: pa.Array
    sums: Sums
    problems: dict[int, str]
    """Why an image is none, by its place."""


def convert(
    samples: Samples,
    rows: np.ndarray,
    form: Form,
    pool: Executor,
    note: Callable[[int], None] = lambda count: None,
) -> Converted:
    """The images of the rows, in that order. `note` hears how many more are done."""
    if samples.pixel_shape is None:
        return _convert_pictures(samples, rows, form, pool, note)
    images, problems = samples.read(rows, pool)
    assert isinstance(images, np.ndarray)
    places = _good_places(len(rows), problems)
    pixels = _to_channels(images if len(places) == len(rows) else images[places], form.shape[0])
    if pixels.shape[1:] != form.shape:
        pixels = _resize(pixels, form, pool)
    values = pixels_to_values(pixels)
    if form.encoding == "encoded":
        # Only pictures need torch.
        from trainyard_trainer.data.image_codec import to_png

        values = pa.array(pool.map(to_png, pixels), pa.binary())
    note(len(rows))
    return Converted(places, values, Sums.of(pixels), problems)


def _good_places(count: int, problems: dict[int, str]) -> np.ndarray:
    return np.setdiff1d(np.arange(count), list(problems))


def _to_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[1] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=1)
    grey: Any = sum(pixels[:, band].astype(np.uint32) * part for band, part in enumerate(LUMA))
    return ((grey + 2**15) >> 16).astype(np.uint8)[:, None]


def _resize(pixels: np.ndarray, form: Form, pool: Executor) -> np.ndarray:
    from trainyard_trainer.data.image_codec import resize

    _, height, width = form.shape
    resized = np.empty((len(pixels), *form.shape), np.uint8)
    for place, image in enumerate(pool.map(partial(resize, height=height, width=width), pixels)):
        resized[place] = image
    return resized


def _convert_pictures(
    samples: Samples, rows: np.ndarray, form: Form, pool: Executor, note: Callable[[int], None]
) -> Converted:
    pieces: list[pa.Array] = [pa.array([], pa.binary())]
    sums = Sums.none(form.shape[0])
    problems: dict[int, str] = {}
    for start in range(0, len(rows), PICTURES_AT_ONCE):
        images, bad = samples.read(rows[start : start + PICTURES_AT_ONCE], pool)
        assert isinstance(images, list)
        good = _good_places(len(images), bad)
        kept = []
        for place, found in zip(good, _convert_each(images, good, form, pool), strict=True):
            if isinstance(found, str):
                bad[int(place)] = found
            else:
                kept.append(found[0])
                sums = sums.plus(found[1])
        pieces.append(pa.array(kept, pa.binary()))
        problems |= {start + place: reason for place, reason in bad.items()}
        note(len(images))
    return Converted(_good_places(len(rows), problems), pa.concat_arrays(pieces), sums, problems)


def _convert_each(
    images: list[bytes], places: np.ndarray, form: Form, pool: Executor
) -> Iterator[tuple[bytes, Sums] | str]:
    return pool.map(lambda place: _convert_one(images[place], form), places.tolist())


def _convert_one(data: bytes, form: Form) -> tuple[bytes, Sums] | str:
    """The bytes to keep, or why there are none."""
    from trainyard_trainer.data import image_codec

    try:
        header = image_codec.read_header(data)
        if not form.is_fitted and (header.height, header.width) != form.shape[1:]:
            _, height, width = form.shape
            return (
                f"it is {header.height} x {header.width}, where others are {height} x {width}; "
                "--size would make all alike"
            )
        if form.encoding == "raw":
            pixels = image_codec.load(data, form.shape, header)
            return pixels.tobytes(), Sums.of(pixels[None])
        data = image_codec.to_plain(data, header, form.shape, shrink=form.is_fitted)
        return data, Sums.of(image_codec.decode(data, form.shape)[None])
    except image_codec.UnreadableError as error:
        return f"it cannot be decoded: {error}"
