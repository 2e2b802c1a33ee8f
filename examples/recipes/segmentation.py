"""Image segmentation: a small U-Net finds circles and squares in noisy images that are drawn on demand."""

from typing import Any

import torch
from torch import nn

from trainyard_trainer import Batch, Loss, Metric, Recipe, Settings

CLASSES, SIZE = 3, 32  # background, circle, square; pixels of a side


class Shapes:
    """Images (1, SIZE, SIZE) with a circle and a square, and the class of each pixel (SIZE, SIZE)."""

    def __init__(self, split: str, num_train: int = 512, num_valid: int = 128) -> None:
        self.first, self.count = (0, num_train) if split == "train" else (num_train, num_valid)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        places = torch.arange(SIZE)
        mask = torch.zeros(SIZE, SIZE, dtype=torch.int64)
        for shape in (1, 2):
            row, column = torch.randint(SIZE // 4, SIZE * 3 // 4, (2,), generator=draw)
            radius = torch.randint(3, SIZE // 5 + 1, (), generator=draw)
            down, right = (places - row).abs()[:, None], (places - column).abs()
            distance = (down**2 + right**2).sqrt() if shape == 1 else torch.maximum(down, right)
            mask[distance < radius] = shape
        noise = torch.randn(1, SIZE, SIZE, generator=draw)
        return {"image": mask[None] * 0.5 + 0.3 * noise, "mask": mask}


class UNet(nn.Module):
    """A U-Net of two levels: (N, 1, H, W) -> (N, CLASSES, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = block(1, width)
        self.bottom = block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Sequential(block(2 * width, width), nn.Conv2d(width, CLASSES, 1))

    def forward(self, image: torch.Tensor) -> Any:
        fine = self.down(image)
        coarse = self.up(self.bottom(nn.functional.max_pool2d(fine, 2)))
        return self.out(torch.cat([fine, coarse], dim=1))


def block(inputs: int, width: int) -> nn.Module:
    """Return a convolution with a norm that does not depend on the other samples of a batch."""
    return nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())


IOU = Metric(
    name="iou",
    direction="higher",
    description="mean intersection over union of the classes",
    shape=(2, CLASSES),  # intersection and union of each class
    compute=lambda sums: float((sums[0] / sums[1].clamp(min=1)).mean()),
)


class Segmentation(Recipe[Settings]):
    """Predicts the class of each pixel; every pixel has the same weight."""

    metrics = (IOU,)

    def build_model(self) -> nn.Module:
        return UNet(width=16)

    def loss(self, model: Any, batch: Batch) -> Loss:
        logits, mask = model(batch["image"]), batch["mask"]
        classes = torch.stack([logits.argmax(dim=1), mask])
        found, right = nn.functional.one_hot(classes, CLASSES).bool()
        overlap = torch.stack([found & right, found | right]).sum(dim=(1, 2, 3))
        total = nn.functional.cross_entropy(logits, mask, reduction="sum")
        return Loss(sum=total, weight=mask.numel(), metrics={"iou": overlap})
