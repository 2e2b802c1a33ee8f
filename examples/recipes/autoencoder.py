"""An autoencoder on handwritten digits: it learns to draw each image from a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from trainyard_trainer import Batch, Evaluation, Loss, Recipe, Settings, Top, random_numbers


class Digits:
    """Images of 8x8 pixels from 0 to 1, with a random shift in training; every fifth is for validation."""

    def __init__(self, split: str, shift: int = 1) -> None:
        images = torch.from_numpy(load_digits().images).float() / 16
        is_valid = torch.arange(len(images)) % 5 == 4
        self.images = images[is_valid if split == "valid" else ~is_valid]
        self.shift = shift if split == "train" else 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # The generator is seeded from seed, epoch and index, so this is the same after a resume.
        down, right = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
        return {"image": self.images[index].roll((down, right), (0, 1)).flatten()}


class AutoencoderSettings(Settings):
    """The keys of `train.model` in the run file."""

    code_size: int = 8
    """How many numbers describe an image."""

    noise: float = 0.3
    """Width of the uniform noise that is added to the pixels of training images."""


class Autoencoder(Recipe[AutoencoderSettings]):
    """Minimises the squared error of the drawn pixels; validation keeps the images that are drawn worst."""

    settings = AutoencoderSettings
    samples = "images"

    def build_model(self) -> nn.Module:
        size = self.config.code_size
        encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, size))
        decoder = nn.Sequential(nn.Linear(size, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
        return nn.Sequential(encoder, decoder)

    def augment(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        # Numbers of random_numbers are the same on any worker; those of torch.rand are not.
        pixels = batch.ids[:, None] * 64 + torch.arange(64, device=batch.ids.device)
        noise = random_numbers(pixels, seed, epoch, stream=0) / 2**31 - 0.5
        return batch.replace(noisy=batch["image"] + self.config.noise * noise)

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> Loss:
        squared = functional.mse_loss(model(batch["noisy"]), batch["image"], reduction="sum")
        return Loss(sum=squared, weight=batch["image"].numel())

    def evaluate(self, model: Callable[..., torch.Tensor], batch: Batch) -> Evaluation:
        squared = (model(batch["image"]) - batch["image"]) ** 2
        worst = torch.stack([squared.mean(dim=1), batch.ids], dim=1).double()
        return Evaluation(
            sum=squared.sum(), weight=squared.numel(), details={"worst": Top(worst, limit=5)}
        )

    def summarize(self, details: dict[str, Any]) -> dict[str, Any]:
        return {"worst_images": [int(number) for _, number in details["worst"].rows.tolist()]}
