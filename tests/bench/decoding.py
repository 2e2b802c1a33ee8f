"""How fast one core decodes JPEG files: ours beside torchvision, PIL and SPDL.

    python -m tests.bench.decoding [--spdl]

All get the bytes of the same files and return pixels in memory. They take turns; a turn is each file once.
SPDL is measured if asked for: it needs the shared libraries of FFmpeg, which no package of Python has.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from tests.bench import data
from tests.bench.rounds import Options, Row, Section, alternate, main, ratios
from trainyard_trainer.data import image_codec

SIDE = 512
ROUNDS = 7
LEAST_SHARE = 0.95

OURS = "trainyard"
TORCHVISION = "torchvision"


def by_trainyard(file: bytes) -> np.ndarray:
    return image_codec.decode(file, (3, SIDE, SIDE))


def by_torchvision(file: bytes) -> np.ndarray:
    content = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    return decode_image(content, ImageReadMode.RGB).numpy()


def by_pil(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB"))


def by_spdl(file: bytes) -> np.ndarray:
    from spdl import io as spdl_io

    to_rgb = spdl_io.get_video_filter_desc(pix_fmt="rgb24")
    return spdl_io.to_numpy(spdl_io.load_image(file, filter_desc=to_rgb))


WAYS: dict[str, Callable[[bytes], np.ndarray]] = {
    OURS: by_trainyard,
    TORCHVISION: by_torchvision,
    "PIL": by_pil,
}


def files_of(count: int) -> list[bytes]:
    """Return JPEG files of 512x512 pixels, in colour, as compressible as photographs."""
    images = data.smooth(np.random.default_rng(0), count, 3, SIDE)
    return [data.jpeg(image) for image in images]


def images_per_s(way: Callable[[bytes], np.ndarray], files: list[bytes]) -> float:
    began = time.perf_counter()
    for file in files:
        way(file)
    return len(files) / (time.perf_counter() - began)


def measure(options: Options) -> list[Section]:
    torch.set_num_threads(1)
    files = files_of(options.choose(256, 4))
    chosen = WAYS | ({"SPDL": by_spdl} if options.more.spdl else {})
    ways = {name: partial(images_per_s, way, files) for name, way in chosen.items()}
    speeds = alternate(ways, options.rounds_or(ROUNDS))
    mean_kib = sum(map(len, files)) / len(files) / 2**10
    return [
        Section(
            title=f"JPEG files of {SIDE}x{SIDE}, decoded by one thread",
            rows=(
                Row(
                    what=f"{OURS} over {TORCHVISION}",
                    unit="x",
                    values=ratios(speeds[OURS], speeds[TORCHVISION]),
                    at_least=LEAST_SHARE,
                ),
                *(
                    Row(what=name, unit="images/s", values=tuple(values))
                    for name, values in speeds.items()
                ),
            ),
            notes=(
                f"{len(files)} colour files, {mean_kib:.0f} KiB each, of quality {data.QUALITY}, from memory "
                "to an array of bytes.",
            ),
        )
    ]


if __name__ == "__main__":
    main(measure, spdl={"action": "store_true", "help": "measure SPDL as well"})
