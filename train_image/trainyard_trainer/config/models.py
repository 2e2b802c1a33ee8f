"""`train.model`: the networks that the recipes can train."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.section import Fraction, Section


class Model(Section):
    """The settings of a torchvision classification model."""

    name: str
    """The model's name in torchvision, such as `resnet18`."""

    in_channels: PositiveInt
    """Channels of an image: 1 for grey, 3 for colour."""

    num_classes: PositiveInt
    """How many classes there are."""

    image_size: PositiveInt = 32
    """Side in pixels to which images are resized on the device."""


class Gpt(Section):
    """The settings of a transformer that predicts the next byte of a text."""

    layers: PositiveInt
    """Number of transformer blocks, each with attention and a two-layer network."""

    heads: PositiveInt
    """Number of attention heads of each block; it must divide the width."""

    width: PositiveInt
    """Embedding size: the number of values that represent each byte between blocks."""

    context_length: Annotated[int, Field(ge=2, le=2**16)]
    """Context length in bytes, which is also the length of a sample."""

    dropout: Fraction = 0.0
    """Share of activations that are set to 0 at random during training."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Gpt:
        if self.width % self.heads:
            below = self.width // self.heads * self.heads or self.heads
            raise PydanticCustomError(
                "one_of",
                f"width = {self.width} cannot be shared evenly by heads = {self.heads}; "
                f"use a width of {below} or {below + self.heads}",
            )
        return self
