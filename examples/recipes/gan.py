"""A GAN: two networks, trained in turn by an optimizer each, learn to draw points on a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainyard_trainer import Batch, Loss, Metric, Networks, Recipe, Settings, random_numbers

RADIUS = 2.0


class Ring:
    """Points (2,) near a circle around the origin."""

    def __init__(self, split: str, num_train: int = 2048, num_valid: int = 512) -> None:
        draw = torch.Generator().manual_seed(0 if split == "train" else 1)
        count = num_train if split == "train" else num_valid
        angle = torch.rand(count, generator=draw) * 2 * torch.pi
        noise = 0.05 * torch.randn(count, 2, generator=draw)
        self.points = RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1) + noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"point": self.points[index]}


def layers(inputs: int, width: int, outputs: int) -> nn.Module:
    hidden = (nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width))
    return nn.Sequential(*hidden, nn.LeakyReLU(0.2), nn.Linear(width, outputs))


class Gan(Recipe[Settings]):
    """The discriminator learns to tell real points from drawn ones, and the generator to deceive it."""

    samples = "points"
    networks = ("discriminator", "generator")
    metrics = (
        Metric(name="distance", direction="lower", description="distance from the ring"),
        Metric(name="generator_loss", direction="lower", description="loss of the generator"),
    )

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"generator": layers(4, 64, 2), "discriminator": layers(2, 64, 1)})

    def augment(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        return batch.replace(noise=noise_of(batch, seed, epoch))

    def network_loss(self, network: str, models: Networks, batch: Batch) -> Loss:
        noise = batch["noise"] if "noise" in batch else noise_of(batch)  # which validation lacks
        drawn, real, count = models["generator"](noise), batch["point"], len(batch)
        if network == "generator":
            total = summed_loss(models["discriminator"](drawn), is_real=True)
            distance = (drawn.norm(dim=1) - RADIUS).abs().sum()
            metrics = {"generator_loss": (total, count), "distance": (distance, count)}
            return Loss(sum=total, weight=count, metrics=metrics)
        of_real, of_drawn = models["discriminator"](torch.cat([real, drawn])).split(count)
        total = summed_loss(of_real, is_real=True) + summed_loss(of_drawn, is_real=False)
        return Loss(sum=total, weight=count)


def noise_of(batch: Batch, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    """Return numbers from -1 to 1 that are the same on any worker: (samples, 4)."""
    numbers = batch.ids[:, None] * 4 + torch.arange(4, device=batch.ids.device)
    return random_numbers(numbers, seed, epoch, stream=0) / 2**30 - 1


def summed_loss(logits: torch.Tensor, *, is_real: bool) -> Any:
    """Return the sum of the losses of a discriminator that should call its points real or drawn."""
    target = torch.full_like(logits, float(is_real))
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")
