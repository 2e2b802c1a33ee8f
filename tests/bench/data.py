"""Images to measure with, made once below build/bench, and prepared by the trainer's `data prepare`."""

from __future__ import annotations

import fcntl
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.bench.rounds import BUILD, ROOT, say
from trainyard_trainer.data.prepared import FORMAT, Prepared, read_prepared
from trainyard_trainer.run_folder.folder import RunFolder

CLASSES = 10
QUALITY = 90
"""Of JPEG files."""
PREPARE = (sys.executable, "-m", "trainyard_trainer.tools.data", "prepare")


def grey_images(count: int) -> Path:
    """A prepared data set of 28 x 28 grey pixels, as MNIST has them."""
    return _prepared(f"grey-28-{count}", "raw", lambda path: write_idx(path, count))


def jpegs(count: int, side: int) -> Path:
    """A prepared data set of colour JPEGs, which are decoded in training."""
    return _prepared(f"jpeg-{side}-{count}", "encoded", lambda path: write_jpegs(path, count, side))


def opened(path: Path) -> Prepared:
    folder = RunFolder.open(str(path.parent), path.name)
    return read_prepared(folder, path=str(path), endpoint=None)


def _prepared(name: str, encoding: str, write: Callable[[Path], None]) -> Path:
    # A data set of another format, made by an earlier version, is not read.
    path = BUILD / "data" / f"{name}-v{FORMAT}"
    source = path.with_name(f"{path.name}.source")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        # One of the processes that want it makes it, and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / "dataset.json").exists():
            return path
        say(f"making {path.relative_to(ROOT)}")
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        write(source)
        command = [*PREPARE, str(source), str(path), f"--encoding={encoding}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def smooth(random: np.random.Generator, count: int, channels: int, side: int) -> np.ndarray:
    """Images (N, side, side, channels) uint8 as compressible as photographs: soft shapes with a little noise.

    An image of class k is brighter in the k-th of ten stripes, so that there is something to learn.
    """
    coarse = random.integers(0, 200, (count, side // 4 + 2, side // 4 + 2, channels), np.uint8)
    soft = coarse.repeat(4, axis=1).repeat(4, axis=2)
    for axis in (1, 2):  # a straight line from one coarse pixel to the next
        soft = sum(np.roll(soft, shift, axis) // 4 for shift in range(4))
    pixels = soft[:, 4 : side + 4, 4 : side + 4] + random.normal(
        0, 4, (1, side, side, channels)
    ).astype(np.int16)
    return pixels.clip(0, 255).astype(np.uint8)


def labelled(seed: int, count: int, channels: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = smooth(random, count, channels, side)
    labels = np.arange(count) % CLASSES
    rows = np.arange(side) * CLASSES // side
    images[rows[None, :] == labels[:, None]] |= 0x80
    return images, labels.astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    """Return a colour image (side, side, 3) as a JPEG file."""
    from PIL import Image

    output = io.BytesIO()
    Image.fromarray(image).save(output, "JPEG", quality=QUALITY)
    return output.getvalue()


def write_idx(path: Path, count: int) -> None:
    images, labels = labelled(0, count, 1, 28)
    sizes = np.array([count, 28, 28], ">u4").tobytes()
    (path / "images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + images.tobytes())
    (path / "labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())


def write_jpegs(path: Path, count: int, side: int) -> None:
    """A folder per class."""
    for label in range(CLASSES):
        (path / str(label)).mkdir()
    for start in range(0, count, 256):
        images, labels = labelled(start, min(256, count - start), 3, side)
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            file = path / str(label) / f"{start + index:06}.jpg"
            file.write_bytes(jpeg(image))
