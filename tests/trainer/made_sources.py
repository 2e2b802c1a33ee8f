"""Small data sets of every kind, made on the spot: image i of n shows its label, and every one is another."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NAMES = ("ant", "bee", "cat")


def pixels(count: int, *, channels: int = 1, side: int = 8, seed: int = 0) -> np.ndarray:
    """(N, C, H, W) uint8; the first four pixels are the image's number, so that it can be told apart."""
    made = np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), np.uint8)
    made[:, 0, 0, :4] = np.arange(count, dtype=">u4").view(np.uint8).reshape(-1, 4)
    return made


def labels(count: int) -> np.ndarray:
    return np.arange(count) % len(NAMES)


def png(pixels_CHW: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    image = pixels_CHW[0] if len(pixels_CHW) == 1 else pixels_CHW.transpose(1, 2, 0)
    output = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(output, kind, **options)
    return output.getvalue()


def write_idx(
    folder: Path, name: str, images: np.ndarray, marks: np.ndarray, *, is_packed: bool = False
) -> Path:
    """The file of images; `name` is train or t10k."""
    folder.mkdir(parents=True, exist_ok=True)
    count, _, height, width = images.shape
    files = {
        "images-idx3-ubyte": np.array([0x803, count, height, width], ">u4").tobytes()
        + images.tobytes(),
        "labels-idx1-ubyte": np.array([0x801, count], ">u4").tobytes()
        + marks.astype(np.uint8).tobytes(),
    }
    suffix = ".gz" if is_packed else ""
    for ending, data in files.items():
        path = folder / f"{name}-{ending}{suffix}"
        path.write_bytes(gzip.compress(data) if is_packed else data)
    return folder / f"{name}-images-idx3-ubyte{suffix}"


def write_folder(
    folder: Path, images: Sequence[bytes], marks: np.ndarray, ending: str = "png"
) -> Path:
    """A sub-folder per class."""
    for number, (image, mark) in enumerate(zip(images, marks, strict=True)):
        path = folder / NAMES[mark] / f"{number:06}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return folder


def write_manifest(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(record) + "\n" for record in records)
        else:
            writer = csv.DictWriter(
                file, records[0], delimiter="\t" if path.suffix == ".tsv" else ","
            )
            writer.writeheader()
            writer.writerows(records)
    return path


def write_table(path: Path, image: pa.Array, marks: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": image, "label": marks}), path, **options)
    return path
