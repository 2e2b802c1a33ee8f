"""MNIST-style idx files: one with all images, one with all labels, perhaps compressed."""

from __future__ import annotations

import gzip
import io
import math
import zlib

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.sources.images.samples import HeldSamples, ImageSource, Source
from trainyard_trainer.data.sources.parts import ALL, choose_splits, is_split_name, stamp_of
from trainyard_trainer.errors import ConfigError

IMAGES_MAGIC = 0x00000803
"""Bytes in three dimensions: images, rows, columns."""
LABELS_MAGIC = 0x00000801


def is_idx_images(name: str) -> bool:
    return "images" in name and "idx3" in name


def open_idx(source: ImageSource, files: list[str]) -> Source:
    """Open the images files among `files`, which lie in one folder, each with its labels.

    Raises ConfigError for files that are not what their names say.
    """
    chosen = _split_files(source, [file for file in files if is_idx_images(_name(file))])
    splits = {split: _read_pair(source.filesystem, file) for split, file in chosen.items()}
    return Source(
        path=source.path,
        kind="idx files",
        splits=splits,
        stamp=stamp_of(
            *(
                (split, zlib.crc32(samples.images), samples.labels.to_pylist())  # type: ignore[arg-type]
                for split, samples in splits.items()
            )
        ),
    )


def _split_files(source: ImageSource, images: list[str]) -> dict[str, str]:
    if len(images) == 1:
        return {ALL: images[0]}
    named: dict[str, list[str]] = {}
    for file in images:
        words = _name(file).replace(".", "-").split("-")
        split = next((word for word in words if is_split_name(word)), None)
        if split is not None:
            named.setdefault(split, []).append(file)
    twice = next((files for files in named.values() if len(files) > 1), None)
    if twice or not named:
        raise ConfigError(
            f"{source.path} has several files of images: {', '.join(map(_name, twice or images))}. "
            "Name one of them as the source, and another one for validation."
        )
    chosen = choose_splits(named, source.path, source.say)
    return {split: named[name][0] for split, name in chosen.items()}


def _read_pair(filesystem: fs.FileSystem, images_file: str) -> HeldSamples:
    labels_file = _find_labels(filesystem, images_file)
    count, rows, columns, pixels = _read(filesystem, images_file, IMAGES_MAGIC)
    num_labels, labels = _read(filesystem, labels_file, LABELS_MAGIC)
    if num_labels != count:
        raise ConfigError(
            f"{images_file} has {count} images, and {labels_file} has {num_labels} labels."
        )
    return HeldSamples(
        images=pixels.reshape(count, 1, rows, columns),
        labels=pa.array(labels.astype(np.int64)),
        file=_name(images_file),
    )


def _find_labels(filesystem: fs.FileSystem, images_file: str) -> str:
    folder, _, name = images_file.rpartition("/")
    plain = name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    candidates = [f"{folder}/{plain}", f"{folder}/{plain}.gz"]
    for candidate, info in zip(candidates, filesystem.get_file_info(candidates), strict=True):
        if info.type == fs.FileType.File:
            return candidate
    raise ConfigError(f"{images_file} has no labels: neither {plain} nor {plain}.gz is beside it.")


def _read(filesystem: fs.FileSystem, path: str, magic: int) -> tuple:
    """The sizes and then the bytes of an idx file. Raises ConfigError."""
    with filesystem.open_input_stream(path, compression=None) as stream:
        packed: io.BufferedIOBase = io.BytesIO(stream.read())
    try:
        with gzip.open(packed) if path.endswith(".gz") else packed as content:
            return _parse(content, path, magic)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} cannot be decompressed: {error}.") from error


def _parse(content: io.BufferedIOBase, path: str, magic: int) -> tuple:
    """Not more is unpacked than the file says that it holds. Raises ConfigError."""
    begin = content.read(4)
    if int.from_bytes(begin, "big") != magic or len(begin) < 4:
        raise ConfigError(
            f"{path} begins with 0x{begin.hex()}, where an idx file of "
            f"{'images' if magic == IMAGES_MAGIC else 'labels'} begins with 0x{magic:08x}."
        )
    num_sizes = magic & 0xFF
    start = 4 + 4 * num_sizes
    sizes = np.frombuffer(content.read(start - 4).ljust(4 * num_sizes, b"\0"), ">u4").tolist()
    count = math.prod(sizes)
    values = bytearray()
    # Piece by piece: the sizes may be lies, and memory for them is asked for only as bytes come.
    while data := content.read(min(2**20, count - len(values))):
        values += data
    has_more = bool(content.read(1))
    if len(values) != count or has_more:
        raise ConfigError(
            f"{path} has {'more than ' if has_more else ''}{start + len(values):,} bytes, where "
            f"{' x '.join(map(str, sizes))} values make {start + count:,}. "
            "It is cut off or not an idx file of bytes."
        )
    return *sizes, np.frombuffer(bytes(values), np.uint8)


def _name(file: str) -> str:
    return file.rpartition("/")[2]
