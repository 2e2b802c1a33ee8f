"""Pictures on the page, each with what the model says of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from html import escape

import numpy as np
from PIL import Image

from trainyard_trainer.recipes.image_classification.predictions import Prediction
from trainyard_trainer.report.elements import bar, note

SMALL_SIDE = 64
"""Up to here each pixel of a picture is shown as it is; larger ones are photographs."""

PHOTO_SIDE = 224
"""Photographs are not shown larger than this."""


def gallery(predictions: Iterable[Prediction]) -> str:
    return f'<div class="pictures">{"".join(map(picture, predictions))}</div>'


def picture(prediction: Prediction) -> str:
    is_right = prediction.label == prediction.predicted
    return (
        f'<figure class="{"right" if is_right else "wrong"}">'
        f'<img alt="{escape(prediction.label)}" src="{source(prediction.pixels)}">'
        f"<figcaption><dl><dt>label</dt><dd>{escape(prediction.label)}</dd>"
        f"<dt>predicted</dt><dd>{escape(prediction.predicted)} "
        f"<i>{'✓' if is_right else '✗'}</i></dd>"
        f"<dt>confidence</dt><dd>{prediction.confidence:.1%}</dd></dl>"
        f"{bar(prediction.confidence)}</figcaption></figure>"
    )


def mistakes(found: Iterable[Prediction]) -> str:
    figures = "".join(
        f'<figure class="wrong"><img alt="{escape(mistake.label)}" src="{source(mistake.pixels)}">'
        f"<figcaption><b>{escape(mistake.label)}</b> taken for <b>{escape(mistake.predicted)}</b>"
        f"<small>confidence {mistake.confidence:.1%}</small>{bar(mistake.confidence)}"
        "</figcaption></figure>"
        for mistake in found
    )
    return f'<div class="mistakes">{figures}</div>' if figures else note("There are none.")


def source(pixels: np.ndarray) -> str:
    """The image (C, H, W) itself as a URL."""
    channels = pixels.transpose(1, 2, 0)
    # One channel is grey, three are colour; of any other number the first is shown.
    image = Image.fromarray(channels if channels.shape[2] == 3 else channels[:, :, 0])
    is_small = max(image.size) <= SMALL_SIDE
    data = io.BytesIO()
    if is_small:
        image.save(data, "PNG")
    else:
        image.thumbnail((PHOTO_SIDE, PHOTO_SIDE))
        image.save(data, "JPEG", quality=85)
    kind = "png" if is_small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
