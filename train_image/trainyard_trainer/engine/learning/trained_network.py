"""A network with the optimizer that trains it: the whole model, or one of the networks of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard_trainer.engine.learning.loss_scale import LossScale


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedNetwork:
    """A network that an optimizer of its own trains."""

    name: str | None
    """Its name in `Recipe.networks`; None for the whole model."""
    module: nn.Module
    """The network with its weights."""
    wrapped: nn.Module
    """The network as the strategy has wrapped it, to exchange gradients."""
    model: nn.Module
    """The wrapped network, compiled if `train.compile` says so."""
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    parameters: tuple[Tensor, ...]
    """The parameters that are trained."""

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
