"""Image segmentation: a small U-Net finds circles and squares in noisy images that are drawn on demand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from trainyard_trainer import Batch, Loss, Metric, Recipe, Settings

CLASSES = 3
"""Background, circle, square."""


class Shapes:
    """Images (1, size, size) with a circle and a square, and the class of each pixel (size, size)."""

    def __init__(
        self, split: str, num_train: int = 512, num_valid: int = 128, size: int = 32
    ) -> None:
        self.first, self.count = (0, num_train) if split == "train" else (num_train, num_valid)
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        rows, columns = torch.meshgrid(
            torch.arange(self.size), torch.arange(self.size), indexing="ij"
        )
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        for shape in (1, 2):
            row, column = torch.randint(self.size // 4, self.size * 3 // 4, (2,), generator=draw)
            radius = torch.randint(3, self.size // 5 + 1, (), generator=draw)
            down, right = (rows - row).abs(), (columns - column).abs()
            is_inside = (
                down**2 + right**2 <= radius**2
                if shape == 1
                else (down < radius) & (right < radius)
            )
            mask[is_inside] = shape
        noise = torch.randn(1, self.size, self.size, generator=draw)
        return {"image": mask[None] * 0.5 + 0.3 * noise, "mask": mask}


class UNet(nn.Module):
    """A U-Net of two levels: (N, 1, H, W) -> (N, CLASSES, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = block(1, width)
        self.bottom = block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Sequential(block(2 * width, width), nn.Conv2d(width, CLASSES, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.down(image)
        coarse = self.bottom(functional.max_pool2d(fine, 2))
        out: torch.Tensor = self.out(torch.cat([fine, self.up(coarse)], dim=1))
        return out


def block(inputs: int, outputs: int) -> nn.Module:
    """Return a convolution with a norm that does not depend on the other samples of a batch."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()
    )


class SegmentationSettings(Settings):
    """The keys of `train.model` in the run file."""

    width: int = 16
    """Number of channels at full resolution; a multiple of 4."""


def mean_iou(sums: torch.Tensor) -> float:
    """Return the mean over the classes of intersection / union; `sums` is (2, CLASSES)."""
    return float((sums[0] / sums[1].clamp(min=1)).mean())


class Segmentation(Recipe[SegmentationSettings]):
    """Predicts the class of each pixel; every pixel has the same weight."""

    settings = SegmentationSettings
    samples = "images"
    metrics = (
        Metric(
            name="iou",
            direction="higher",
            description="mean intersection over union of the classes",
            shape=(2, CLASSES),
            compute=mean_iou,
        ),
    )

    def build_model(self) -> nn.Module:
        return UNet(self.config.width)

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> Loss:
        logits, mask = model(batch["image"]), batch["mask"]
        found, right = (
            functional.one_hot(each, CLASSES).bool() for each in (logits.argmax(dim=1), mask)
        )
        overlap = torch.stack([found & right, found | right]).sum(dim=(1, 2, 3))
        total = functional.cross_entropy(logits, mask, reduction="sum")
        return Loss(sum=total, weight=mask.numel(), metrics={"iou": overlap})
