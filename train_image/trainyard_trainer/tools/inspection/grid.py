"""Pictures with a line of text each, side by side in one PNG file."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

MOST = 100
"""Pictures in one grid; more could not be told apart."""

CELL_INCHES = 1.5
CAPTION_CHARACTERS = 24


def draw_grid(pictures: Sequence[tuple[np.ndarray, str]]) -> bytes:
    """A PNG file of the first MOST pictures, each (C, H, W) uint8 with its caption."""
    shown = pictures[:MOST]
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(columns * CELL_INCHES, rows * CELL_INCHES), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.set_axis_off()
    for axes, (pixels_CHW, caption) in zip(figure.axes, shown, strict=False):
        # One channel is grey, three are colour; of any other number the first is shown.
        is_colour = len(pixels_CHW) == 3
        image = pixels_CHW.transpose(1, 2, 0) if is_colour else pixels_CHW[0]
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_title(shortened(caption), fontsize=7, parse_math=False)
    output = io.BytesIO()
    figure.savefig(output, format="png", dpi=120)
    return output.getvalue()


def shortened(caption: str) -> str:
    if len(caption) <= CAPTION_CHARACTERS:
        return caption
    return f"{caption[: CAPTION_CHARACTERS - 1]}…"
