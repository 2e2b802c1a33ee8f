"""Fine-tuning of an image model of timm from weights in a file: the head is new, the rest learns more slowly.

The images are the handwritten digits of scikit-learn, enlarged; replace `Digits` by images of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import timm
import torch
from pydantic import Field
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torchvision.transforms.functional import normalize

from trainyard_trainer import Batch, Loss, Metric, Recipe, Settings


class Digits:
    """Images (3, size, size) from 0 to 1, and their digit; every fifth is for validation."""

    def __init__(self, split: str, size: int = 32) -> None:
        images, labels = load_digits(return_X_y=True)
        is_valid = torch.arange(len(labels)) % 5 == 4
        chosen = is_valid if split == "valid" else ~is_valid
        small = torch.from_numpy(images).float().reshape(-1, 1, 8, 8)[chosen] / 16
        self.images = functional.interpolate(small, size, mode="bilinear")
        self.labels = torch.from_numpy(labels)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index].expand(3, -1, -1), "label": self.labels[index]}


class TimmSettings(Settings):
    """The keys of `train.model` in the run file."""

    name: str
    """A model of timm, such as resnet18."""
    num_classes: int = Field(default=10, ge=2)
    """The number of classes of the new head."""
    trunk_lr_scale: float = Field(default=0.1, ge=0)
    """The learning rate of all other layers, as a multiple of that of the head."""


class FineTune(Recipe[TimmSettings]):
    """Cross-entropy of a model whose weights come from `train.init`, its head excepted."""

    settings = TimmSettings
    samples = "images"
    metrics = (Metric(name="accuracy", direction="higher", description="share of right classes"),)

    def build_model(self) -> nn.Module:
        model: nn.Module = timm.create_model(self.config.name, num_classes=self.config.num_classes)
        return model

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, torch.Tensor]:
        columns = super().collate(samples)
        known = timm.get_pretrained_cfg(self.config.name)  # how images were scaled for the weights
        return {**columns, "image": normalize(columns["image"], known.mean, known.std)}

    def takes_one_sample(self) -> bool:
        return False  # most models of timm have batch norm

    def parameter_groups(self, model: nn.Module) -> Iterable[torch.Tensor | dict[str, Any]]:
        head = [*model.get_classifier().parameters()]  # type: ignore[operator, union-attr]
        of_head = {id(each) for each in head}
        trunk = [each for each in model.parameters() if id(each) not in of_head]
        return [{"params": head}, {"params": trunk, "lr_scale": self.config.trunk_lr_scale}]

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> Loss:
        scores = model(batch["image"])
        total = functional.cross_entropy(scores, batch["label"], reduction="sum")
        right = (scores.argmax(dim=1) == batch["label"]).sum()
        return Loss(sum=total, weight=len(batch), metrics={"accuracy": (right, len(batch))})
