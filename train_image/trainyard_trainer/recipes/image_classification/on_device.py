"""uint8 pixels as the model wants them, made on the device where they are: no step per image, no generator.

What is drawn for an image depends on seed, epoch and the image's id alone. So augmentation is the same
at any number of workers, and a run that goes on in mid-epoch needs no generator's state for it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trainyard_trainer.config.data.section import Augment
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.recipes.random_numbers import random_numbers


class ToInput:
    """Normalises by the training images' mean and std, and resizes to the model's square."""

    def __init__(self, info: DatasetInfo, image_size: int, device: torch.device) -> None:
        self.image_size = image_size
        # pixel / 255 - mean, over std, as one multiplication and one addition.
        mean = torch.tensor(info.mean, device=device).view(1, -1, 1, 1)
        std = torch.tensor(info.std, device=device).view(1, -1, 1, 1)
        self.factor = 1 / (255 * std)
        self.summand = -mean / std

    def __call__(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """float32 (N, C, image_size, image_size)."""
        inputs = torch.addcmul(self.summand, pixels_NCHW.float(), self.factor)
        size = self.image_size
        if inputs.shape[-2:] == (size, size):
            return inputs
        return functional.interpolate(inputs, size=size, mode="bilinear", antialias=True)


def augmented(batch: Batch, augment: Augment, *, seed: int, epoch: int) -> torch.Tensor:
    """The batch's pixels, each image changed in its own way."""
    pixels = batch["image"]
    if augment.flip:
        mirrored = random_numbers(batch.ids, seed, epoch, stream=0) % 2 == 0
        pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
    if augment.crop:
        choices = 2 * augment.crop + 1
        down = random_numbers(batch.ids, seed, epoch, stream=1) % choices
        right = random_numbers(batch.ids, seed, epoch, stream=2) % choices
        pixels = cut(functional.pad(pixels, [augment.crop] * 4), down, right, pixels.shape[-2:])
    return pixels


def cut(
    pixels_NCHW: torch.Tensor, down: torch.Tensor, right: torch.Tensor, size: torch.Size
) -> torch.Tensor:
    """From each image the window of this size whose upper left corner is at (down, right)."""
    device = pixels_NCHW.device
    count, channels = pixels_NCHW.shape[:2]
    images = torch.arange(count, device=device).view(-1, 1, 1, 1)
    rows = (down.view(-1, 1) + torch.arange(size[0], device=device)).view(count, 1, size[0], 1)
    columns = (right.view(-1, 1) + torch.arange(size[1], device=device)).view(count, 1, 1, size[1])
    return pixels_NCHW[
        images, torch.arange(channels, device=device).view(1, -1, 1, 1), rows, columns
    ]
