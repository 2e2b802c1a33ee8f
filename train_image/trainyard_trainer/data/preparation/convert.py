"""Convert the images of a source into the format of the prepared data set. Each image is decoded and
checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from trainyard_trainer.data.sources.images.samples import Samples
from trainyard_trainer.data.stored_rows import pixels_to_values

FILES_AT_ONCE = 128
"""The number of image files that are in memory at once."""

LUMA = (19595, 38470, 7471)
"""The weights of red, green and blue in a grey value, times 2**16, as ITU-R BT.601 defines them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """The format in which a prepared data set stores its images."""

    shape: tuple[int, int, int]
    encoding: Literal["raw", "encoded"]
    is_fitted: bool
    """Whether images are cropped and resized to the shape; if not, each image must have that size."""


class PixelSums(NamedTuple):
    """Exact sums from which mean and standard deviation follow, in whatever order they are added."""

    pixels: int
    """The number of pixels of each channel."""
    total: tuple[int, ...]
    """The sum of the pixel values, per channel."""
    squares: tuple[int, ...]
    """The sum of the squared pixel values, per channel."""

    @classmethod
    def of(cls, pixels_NCHW: np.ndarray) -> PixelSums:
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
    def none(cls, channels: int) -> PixelSums:
        return cls(0, (0,) * channels, (0,) * channels)

    @classmethod
    def of_json(cls, values: list) -> PixelSums:
        pixels, total, squares = values
        return cls(pixels, tuple(total), tuple(squares))

    def plus(self, other: PixelSums) -> PixelSums:
        return PixelSums(
            self.pixels + other.pixels,
            tuple(map(sum, zip(self.total, other.total, strict=True))),
            tuple(map(sum, zip(self.squares, other.squares, strict=True))),
        )

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean per channel, with pixels from 0 to 1."""
        return tuple(total / (255 * self.pixels) for total in self.total)

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation per channel, with pixels from 0 to 1."""
        return tuple(
            (self.pixels * squares - total**2) ** 0.5 / (255 * self.pixels)
            for total, squares in zip(self.total, self.squares, strict=True)
        )


class Converted(NamedTuple):
    """The converted images of some rows, and the rows that have no usable image."""

    indices: np.ndarray
    """The indices of the good images among the requested rows."""
    values: pa.Array
    sums: PixelSums
    problems: dict[int, str]
    """Why an image cannot be used, by its index among the requested rows."""


def convert(
    samples: Samples,
    rows: np.ndarray,
    form: StoredFormat,
    pool: Executor,
    note: Callable[[int], None] = lambda count: None,
) -> Converted:
    """Return the converted images of the rows, in that order.

    `note` is called with the number of rows that are finished since its last call.
    """
    if samples.pixel_shape is None:
        return _convert_files(samples, rows, form, pool, note)
    images, problems = samples.read(rows, pool)
    assert isinstance(images, np.ndarray)
    indices = _good_indices(len(rows), problems)
    pixels = _to_channels(images if len(indices) == len(rows) else images[indices], form.shape[0])
    if pixels.shape[1:] != form.shape:
        pixels = _resize(pixels, form, pool)
    values = pixels_to_values(pixels)
    if form.encoding == "encoded":
        # Only image files need torch.
        from trainyard_trainer.data.image_codec import to_png

        values = pa.array(pool.map(to_png, pixels), pa.binary())
    note(len(rows))
    return Converted(indices, values, PixelSums.of(pixels), problems)


def _good_indices(count: int, problems: dict[int, str]) -> np.ndarray:
    return np.setdiff1d(np.arange(count), list(problems))


def _to_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[1] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=1)
    grey: Any = sum(pixels[:, band].astype(np.uint32) * part for band, part in enumerate(LUMA))
    return ((grey + 2**15) >> 16).astype(np.uint8)[:, None]


def _resize(pixels: np.ndarray, form: StoredFormat, pool: Executor) -> np.ndarray:
    from trainyard_trainer.data.image_codec import resize

    _, height, width = form.shape
    resized = np.empty((len(pixels), *form.shape), np.uint8)
    for index, image in enumerate(pool.map(partial(resize, height=height, width=width), pixels)):
        resized[index] = image
    return resized


def _convert_files(
    samples: Samples,
    rows: np.ndarray,
    form: StoredFormat,
    pool: Executor,
    note: Callable[[int], None],
) -> Converted:
    pieces: list[pa.Array] = [pa.array([], pa.binary())]
    sums = PixelSums.none(form.shape[0])
    problems: dict[int, str] = {}
    for start in range(0, len(rows), FILES_AT_ONCE):
        images, bad = samples.read(rows[start : start + FILES_AT_ONCE], pool)
        assert isinstance(images, list)
        good = _good_indices(len(images), bad)
        kept = []
        for index, found in zip(good, _convert_each(images, good, form, pool), strict=True):
            if isinstance(found, str):
                bad[int(index)] = found
            else:
                kept.append(found[0])
                sums = sums.plus(found[1])
        pieces.append(pa.array(kept, pa.binary()))
        problems |= {start + index: reason for index, reason in bad.items()}
        note(len(images))
    return Converted(_good_indices(len(rows), problems), pa.concat_arrays(pieces), sums, problems)


def _convert_each(
    images: list[bytes], indices: np.ndarray, form: StoredFormat, pool: Executor
) -> Iterator[tuple[bytes, PixelSums] | str]:
    return pool.map(lambda index: _convert_one(images[index], form), indices.tolist())


def _convert_one(data: bytes, form: StoredFormat) -> tuple[bytes, PixelSums] | str:
    """Return the bytes to store and their sums, or the reason why the image cannot be used."""
    from trainyard_trainer.data import image_codec

    try:
        header = image_codec.read_header(data)
        if not form.is_fitted and (header.height, header.width) != form.shape[1:]:
            _, height, width = form.shape
            return (
                f"it is {header.height} x {header.width}, where others are {height} x {width}; "
                "use --size to resize all images"
            )
        if form.encoding == "raw":
            pixels = image_codec.load(data, form.shape, header)
            return pixels.tobytes(), PixelSums.of(pixels[None])
        data = image_codec.to_plain(data, header, form.shape, shrink=form.is_fitted)
        return data, PixelSums.of(image_codec.decode(data, form.shape)[None])
    except image_codec.UnreadableError as error:
        return f"it cannot be decoded: {error}"
