"""Picture files to pixels and back.

A prepared data set holds plain pictures alone: JPEG or PNG of 8 bits, grey or RGB, upright. torchvision
decodes them, at up to twice PIL's speed. What comes from elsewhere goes through PIL first, which knows the
rest: other formats, palettes, CMYK, 16 bits, alpha (shown on white), and the orientation that a camera notes.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif"),
)
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")

JPEG_QUALITY = 95

JPEG_START = b"\xff\xd8"
JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
"""Markers of the segment with the bits and the number of colours: baseline, extended and progressive."""
JPEG_EXIF = 0xE1
"""The marker of the segment that can hold an orientation."""
JPEG_WITHOUT_SIZE = (0x01, *range(0xD0, 0xDB), 0xFF)
"""Markers that begin no segment with a size, or the pixels."""

ORIENTATION = 0x0112
"""EXIF tag; 5 to 8 say that the picture lies on its side."""
EXIF_NOTES = (b"eXIf", b"Raw profile type exif", b"com.adobe.xmp")
"""One of them is in every PNG that has EXIF data."""

# What PIL is known to raise for files that are no pictures, or broken ones.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class UnreadableError(Exception):
    """A picture that cannot be used; the message says why and names no file."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a picture file says of itself."""

    height: int
    width: int
    """Both of the upright picture."""
    channels: int
    """1 for grey, 3 for colour."""
    is_jpeg: bool
    is_plain: bool
    """`decode` can take it as it is."""


def read_header(data: bytes) -> Header:
    """Read the format, size and channels of an image file. Raises UnreadableError."""
    try:
        with _open(data) as image:
            return _header_of(image, data)
    except _BROKEN as error:
        raise _unreadable(error) from error


def is_plain_jpeg(data: bytes) -> bool:
    """Return whether a file is a JPEG that `decode` can take as it is, without an orientation.

    This reads the beginning of the file, in a tenth of the time of `read_header`. It is false for a file of
    which only PIL knows.
    """
    place = 2
    if data[:place] != JPEG_START:
        return False
    while place + 10 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in JPEG_FRAMES:
            bits, components = data[place + 4], data[place + 9]
            return bits == 8 and components in (1, 3)
        if marker == JPEG_EXIF or marker in JPEG_WITHOUT_SIZE:
            return False
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return False


def decode(data: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """Pixels (C, H, W) uint8 of a plain picture, the middle of it where its shape is another one.

    Raises UnreadableError.
    """
    # Not at the top: the import takes more than a second, which text and tables would pay, too.
    from torchvision.io import ImageReadMode, decode_image

    channels, height, width = shape
    mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
    try:
        # Copied, because torch wants memory that may be written to.
        pixels = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode)
    except (RuntimeError, ValueError) as error:
        raise _unreadable(error) from error
    # Never with torch's own threads: each of ours would start as many again.
    return resize(pixels.numpy(), height, width)


def load(data: bytes, shape: tuple[int, int, int], header: Header | None = None) -> np.ndarray:
    """Pixels (C, H, W) uint8 of any picture. Raises UnreadableError."""
    if is_plain_jpeg(data) or (header or read_header(data)).is_plain:
        return decode(data, shape)
    return _to_pixels(_draw(data, shape))


def to_plain(data: bytes, header: Header, shape: tuple[int, int, int], *, shrink: bool) -> bytes:
    """The picture as a prepared data set keeps it: the same bytes if they are plain.

    `shrink` makes a picture that is larger than the shape as small as that, if it then takes fewer bytes.
    Raises UnreadableError.
    """
    is_larger = header.height > shape[1] and header.width > shape[2]
    if shrink and is_larger:
        smaller = _encode(_draw(data, shape), "JPEG")
        return data if header.is_plain and len(smaller) >= len(data) else smaller
    if header.is_plain:
        return data
    own_shape = (shape[0], header.height, header.width)
    return _encode(_draw(data, own_shape), "JPEG" if header.is_jpeg else "PNG")


def to_png(pixels_CHW: np.ndarray) -> bytes:
    """A picture file that loses nothing, of 1 or 3 channels."""
    return _encode(_to_image(pixels_CHW), "PNG")


def resize(pixels_CHW: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of an image in that size."""
    if pixels_CHW.shape[1:] == (height, width):
        return pixels_CHW
    return _to_pixels(_crop(_to_image(pixels_CHW), (width, height)))


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _header_of(image: Image.Image, data: bytes) -> Header:
    orientation = _orientation(image, data)
    width, height = image.size if orientation < 5 else image.size[::-1]
    is_jpeg = image.format in ("JPEG", "MPO")
    is_simple = image.mode in ("L", "RGB") and orientation == 1
    if image.format == "PNG":
        # PIL calls 1 to 16 bits L or RGB all the same; the file's first chunk knows.
        bits, colour = data[24:26]
        is_simple &= bits == 8 and colour in (0, 2) and "transparency" not in image.info
    return Header(
        height=height,
        width=width,
        channels=1 if image.mode in ("1", "L", "LA", "La", "I", "I;16", "I;16B") else 3,
        is_jpeg=is_jpeg,
        is_plain=is_simple and (is_jpeg or image.format == "PNG"),
    )


def _orientation(image: Image.Image, data: bytes) -> int:
    # A PNG can have it behind its pixels, and PIL would decode these to look.
    if image.format == "PNG" and not any(note in data for note in EXIF_NOTES):
        return 1
    return image.getexif().get(ORIENTATION, 1)


def _draw(data: bytes, shape: tuple[int, int, int]) -> Image.Image:
    """The picture upright, in grey or colour, in that height and width. Raises UnreadableError."""
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    try:
        with _open(data) as image:
            orientation = _orientation(image, data)
            lying = (height, width) if orientation >= 5 else (width, height)
            # A JPEG can be decoded at half, a quarter or an eighth of its size, in a fraction of the time.
            if image.size != lying:
                image.draft(mode, lying)
            image.load()
            drawn = _crop(_to_mode(image, mode), lying)
            if orientation != 1:
                drawn.getexif()[ORIENTATION] = orientation
                drawn = ImageOps.exif_transpose(drawn)
            return drawn
    except _BROKEN as error:
        raise _unreadable(error) from error


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, of which nobody knows which number is white")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    if image.size == size:
        return image
    left, top, width, height = _middle(*image.size, *size)
    box = (left, top, left + width, top + height)
    return image.resize(size, Image.Resampling.BILINEAR, box=box)


def _middle(width: int, height: int, new_width: int, new_height: int) -> tuple[int, int, int, int]:
    """The largest box of the new proportions in the middle of the old: left, top, width, height."""
    if width * new_height >= height * new_width:
        box_width, box_height = max(1, round(height * new_width / new_height)), height
    else:
        box_width, box_height = width, max(1, round(width * new_height / new_width))
    return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def _to_image(pixels_CHW: np.ndarray) -> Image.Image:
    return Image.fromarray(
        pixels_CHW[0]
        if len(pixels_CHW) == 1
        else np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))
    )


def _to_pixels(image: Image.Image) -> np.ndarray:
    pixels = np.array(image)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _encode(image: Image.Image, kind: str) -> bytes:
    output = io.BytesIO()
    # Nothing of the original goes along: an old orientation would turn the picture again.
    image.info.clear()
    image.save(output, kind, **({"quality": JPEG_QUALITY} if kind == "JPEG" else {}), exif=b"")
    return output.getvalue()


def _unreadable(error: Exception) -> UnreadableError:
    if isinstance(error, Image.UnidentifiedImageError):
        return UnreadableError("it is no picture of a known format")
    reason = str(error).splitlines()
    return UnreadableError(reason[0] if reason else type(error).__name__)
