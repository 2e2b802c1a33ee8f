"""Distribute a model over workers with DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from typing_extensions import assert_never

from trainyard_trainer.config.training.strategies import DeepSpeedConfig, Fsdp2Config
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.parallel.ddp import DdpStrategy
from trainyard_trainer.parallel.fsdp2 import Fsdp2Strategy
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.parallel.zero import ZeroStrategy


class Strategy(Protocol):
    """The interface of a strategy to distribute a model over workers."""

    is_sharded: bool
    """Whether each worker holds a part of the state, so that all must take part in passes and saves."""

    shards_weights: bool
    """Whether the weights are a part of what is sharded."""

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """Return the network, wrapped so that its backward pass exchanges gradients.

        The network is on the worker's device. If the strategy shards it, it is in host memory, and this
        method moves it to the device.
        """

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and the optimizer for the loop. DeepSpeed combines both in its engine."""

    def clear_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of the step before, or set them to 0 if their memory is used again."""

    def optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return what the optimizer keeps: its state for each weight, with ZeRO also its copies of weights.

        It has no state before its first step. Raises ConfigError if the state is not a tensor.
        """

    def make_optimizer_state(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Make the state of optimizers that have made no step yet. Its values are to be loaded."""

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Run the backward pass, and add its gradients to those of earlier passes of the step."""

    def clip(self, network: nn.Module, norm: float) -> None:
        """Clip the gradients of a step to this 2-norm, computed over all weights."""

    def scale_gradients(self, network: nn.Module, factor: torch.Tensor) -> None:
        """Multiply the gradients of a step, which all passes have added, by a scalar."""

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients without communication.

        Strategies whose workers do not hold all gradients communicate nevertheless.
        """

    def sync_buffers(self, network: nn.Module, worker: Worker) -> None:
        """Copy the buffers of rank 0 to all workers, before they validate or save shards."""

    def reshard(self, network: nn.Module) -> None:
        """Free the weights that were gathered for a validation."""

    def exchange_s(self, model: nn.Module) -> float:
        """Return the seconds per step of communication that did not overlap with the backward pass."""

    def last_exchange_s(self, model: nn.Module) -> float:
        """Return the same for the newest step that was measured, with the wait for slower workers."""


def strategy_of(
    train: Train,
    dtype: torch.dtype | None,
    units_of: Callable[[nn.Module], Sequence[nn.Module]],
    *,
    accumulates: bool = False,
) -> Strategy:
    """Build the strategy of `train.strategy`.

    `dtype` is the data type of autocast, if it is used. `units_of` returns the modules of a network whose
    weights FSDP2 gathers together, the inner ones first. `accumulates` tells that steps have several passes.
    """
    match train.strategy:
        case "ddp":
            return DdpStrategy(accumulates=accumulates)
        case "fsdp2":
            return Fsdp2Strategy(train.fsdp2 or Fsdp2Config(), units_of)
        case "deepspeed":
            options = train.deepspeed or DeepSpeedConfig()
            return ZeroStrategy(options, clip_norm=train.clip_norm or 0.0, dtype=dtype)
        case _:
            assert_never(train.strategy)
