"""Picture files of all sorts become the same pixels."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainyard_trainer.data import image_codec

HEIGHT, WIDTH = 60, 80


def smooth(mode: str = "RGB") -> Image.Image:
    """A picture without sharp edges: JPEG hardly changes it."""
    coarse = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).convert(mode)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    output = io.BytesIO()
    image.save(output, kind, **options)
    return output.getvalue()


def channels_first(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def difference(pixels: np.ndarray, wanted: np.ndarray) -> float:
    assert pixels.shape == wanted.shape
    assert pixels.dtype == np.uint8
    return float(np.abs(pixels.astype(int) - wanted).mean())


SIXTEEN_BITS = Image.fromarray(np.asarray(smooth("L")).astype(np.uint16) * 257)

FILES = {
    "JPEG": (file_of(smooth(), "JPEG", quality=95), True),
    "progressive JPEG": (file_of(smooth(), "JPEG", quality=95, progressive=True), True),
    "grey JPEG": (file_of(smooth("L"), "JPEG", quality=95), True),
    "CMYK": (file_of(smooth("CMYK"), "JPEG", quality=95), False),
    "PNG": (file_of(smooth(), "PNG"), True),
    "grey PNG": (file_of(smooth("L"), "PNG"), True),
    "16 bits": (file_of(SIXTEEN_BITS, "PNG"), False),
    "16 bits in TIFF": (file_of(SIXTEEN_BITS, "TIFF"), False),
    "alpha": (file_of(smooth("RGBA"), "PNG"), False),
    "grey with alpha": (file_of(smooth("LA"), "PNG"), False),
    "BMP": (file_of(smooth(), "BMP"), False),
    "PPM": (file_of(smooth(), "PPM"), False),
    "TIFF": (file_of(smooth(), "TIFF"), False),
    "WebP": (file_of(smooth(), "WEBP", lossless=True), False),
    "JPEG 2000": (file_of(smooth(), "JPEG2000"), False),
}


@pytest.mark.parametrize("name", FILES)
def test_any_format_gives_the_picture_in_colour_and_in_grey(name: str) -> None:
    data, is_plain = FILES[name]
    header = image_codec.read_header(data)
    assert (header.height, header.width, header.is_plain) == (HEIGHT, WIDTH, is_plain)
    wanted = smooth("L") if header.channels == 1 else smooth()
    colour = image_codec.load(data, (3, HEIGHT, WIDTH))
    grey = image_codec.load(data, (1, HEIGHT, WIDTH))
    assert difference(colour, channels_first(wanted.convert("RGB"))) < 2
    assert difference(grey, channels_first(smooth("L"))) < 2


@pytest.mark.parametrize("name", FILES)
def test_a_plain_jpeg_is_known_by_its_first_bytes(name: str) -> None:
    data, is_plain = FILES[name]
    assert image_codec.is_plain_jpeg(data) == (is_plain and "JPEG" in name)
    assert not any(image_codec.is_plain_jpeg(data[:end]) for end in range(12))


def test_a_jpeg_with_an_orientation_is_left_to_pil() -> None:
    notes = Image.Exif()
    notes[image_codec.ORIENTATION] = 6
    lying = file_of(smooth(), "JPEG", exif=notes)
    assert not image_codec.is_plain_jpeg(lying)
    assert image_codec.load(lying, (3, WIDTH, HEIGHT)).shape == (3, WIDTH, HEIGHT)


@pytest.mark.parametrize("name", FILES)
def test_what_is_kept_is_plain_and_shows_the_same(name: str) -> None:
    data, is_plain = FILES[name]
    header = image_codec.read_header(data)
    shape = (header.channels, HEIGHT, WIDTH)
    kept = image_codec.to_plain(data, header, shape, shrink=False)
    assert (kept == data) == is_plain
    assert image_codec.read_header(kept).is_plain
    assert (
        difference(image_codec.decode(kept, shape), image_codec.load(data, shape).astype(int)) < 2
    )

    small = image_codec.to_plain(data, header, (header.channels, 24, 24), shrink=True)
    assert len(small) < len(data) or small == data or not is_plain
    assert image_codec.read_header(small).is_plain
    loaded = image_codec.load(data, (header.channels, 24, 24))
    assert difference(image_codec.decode(small, (header.channels, 24, 24)), loaded.astype(int)) < 5


def test_palettes_and_two_colours_are_looked_up() -> None:
    flat = Image.fromarray(np.kron([[0, 255], [255, 0]], np.ones((8, 8))).astype(np.uint8))
    for data in (
        file_of(flat.quantize(2), "PNG"),
        file_of(flat.quantize(2), "GIF"),
        file_of(flat.convert("1"), "PNG"),
    ):
        assert difference(image_codec.load(data, (1, 16, 16)), channels_first(flat)) < 1


def turned(orientation: int) -> Image.Image:
    """The picture as a camera stores it that notes this orientation."""
    how = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    return smooth() if orientation == 1 else smooth().transpose(Image.Transpose(how[orientation]))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[image_codec.ORIENTATION] = orientation
    data = file_of(turned(orientation), kind, exif=exif, quality=98)
    header = image_codec.read_header(data)
    assert (header.height, header.width) == (HEIGHT, WIDTH)
    wanted = channels_first(smooth())
    assert difference(image_codec.load(data, (3, HEIGHT, WIDTH)), wanted) < 1.5
    kept = image_codec.to_plain(data, header, (3, HEIGHT, WIDTH), shrink=False)
    assert difference(image_codec.decode(kept, (3, HEIGHT, WIDTH)), wanted) < 1.5
    small = image_codec.load(file_of(smooth(), "PNG"), (3, 20, 20)).astype(int)
    assert difference(image_codec.load(data, (3, 20, 20)), small) < 2


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert (image_codec.load(file_of(clear, "PNG"), (3, 8, 8)) == 255).all()


def test_the_middle_is_kept() -> None:
    wide = np.zeros((3, 10, 30), np.uint8)
    wide[:, :, 10:20] = 255
    data = file_of(Image.fromarray(wide.transpose(1, 2, 0)), "PNG")
    assert (image_codec.load(data, (3, 10, 10)) == 255).all()
    # The outer pixels may have something of their neighbours.
    assert (image_codec.resize(wide, 5, 5)[:, :, 1:-1] == 255).all()


def test_32_bits_are_refused() -> None:
    deep = file_of(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF")
    with pytest.raises(image_codec.UnreadableError, match="32 bits"):
        image_codec.load(deep, (1, 8, 8))


@pytest.mark.parametrize("name", FILES)
def test_broken_files_are_unreadable_and_nothing_worse(name: str) -> None:
    random = np.random.default_rng(1)
    data = FILES[name][0]
    for _ in range(40):
        broken = bytearray(data[: random.integers(0, len(data) + 1)])
        for place in random.integers(0, max(len(broken), 1), 5 * (len(broken) > 0)):
            broken[place] = random.integers(0, 256)
        with suppress(image_codec.UnreadableError):
            assert image_codec.load(bytes(broken), (3, 20, 20)).shape == (3, 20, 20)
    with pytest.raises(image_codec.UnreadableError, match="no picture of a known format"):
        image_codec.load(b"none", (3, 20, 20))
