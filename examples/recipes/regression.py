"""Regression on a table: a small network predicts how far diabetes progresses within a year.

The table comes with scikit-learn: 442 patients, 10 features, one target.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional

from trainyard_trainer import Batch, Loss, Metric, Recipe, Settings


class Patients:
    """Every fifth patient is for validation, the others for training."""

    def __init__(self, split: str) -> None:
        features, target = load_diabetes(return_X_y=True)
        is_valid = torch.arange(len(target)) % 5 == 4
        chosen = is_valid if split == "valid" else ~is_valid
        # scikit-learn has scaled the features to a norm of 1 over all patients.
        self.features = torch.from_numpy(features).float()[chosen] * math.sqrt(len(target))
        self.target = torch.from_numpy(target).float()[chosen]

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"features": self.features[index], "target": self.target[index]}


class RegressionSettings(Settings):
    """The keys of `train.model` in the run file."""

    width: int = 32
    """Number of hidden units."""


class Regression(Recipe[RegressionSettings]):
    """Minimises the squared error of a network with one hidden layer."""

    settings = RegressionSettings
    samples = "patients"
    metrics = (
        Metric(
            name="rmse",
            direction="lower",
            description="root mean squared error",
            compute=lambda sums: math.sqrt(sums[0] / sums[1]),
        ),
    )

    def build_model(self) -> nn.Module:
        width = self.config.width
        model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))
        nn.init.constant_(model[2].bias, 150.0)  # near the mean of the target
        return model

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> Loss:
        predicted = model(batch["features"]).squeeze(1)
        squared = functional.mse_loss(predicted, batch["target"], reduction="sum")
        return Loss(sum=squared, weight=len(batch), metrics={"rmse": (squared, len(batch))})
