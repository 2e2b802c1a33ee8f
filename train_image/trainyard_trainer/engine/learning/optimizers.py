"""Optimizers, learning-rate schedules, precision and weight averaging."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import assert_never

from trainyard_trainer.config.training.optimizers import AdamW, Constant, Cosine, Sgd, Steps
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.torch_strategy import local_shard

PrecisionName = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
"""The values of `train.precision`."""


Parameters = Iterable[Tensor | dict[str, Any]]
"""Parameters of a network, or groups of them with options for the optimizer."""


def build_optimizer(
    parameters: Parameters,
    train: Train,
    device: torch.device,
    *,
    network: str | None = None,
    is_sharded: bool = False,
) -> torch.optim.Optimizer:
    """Build the optimizer of the model, fused into one kernel where torch has such a kernel.

    `network` names one of the recipe's networks that is trained by an optimizer of its own.
    """
    optimizer = train.optimizer_of(network)
    is_fused = device.type in ("cpu", "cuda")
    match optimizer:
        case Sgd():
            return torch.optim.SGD(
                parameters,  # type: ignore[arg-type]
                lr=optimizer.learning_rate,
                momentum=optimizer.momentum,
                weight_decay=optimizer.weight_decay,
                # torch has no fused SGD for DTensors. With a loss scaler, the fused SGD of torch 2.11 and
                # 2.13 leaves the momentum uninitialised if the gradients of the first step overflow.
                fused=is_fused and not is_sharded and train.precision != "fp16",
            )
        case AdamW():
            return torch.optim.AdamW(
                parameters,  # type: ignore[arg-type]
                lr=optimizer.learning_rate,
                weight_decay=optimizer.weight_decay,
                fused=is_fused,
            )
        case _:
            assert_never(optimizer)


def require_all_trained(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module) -> None:
    """Raise ConfigError if a parameter of the model would not be trained, though it has gradients."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(each) for group in groups for each in group["params"]}
    missing = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and id(each) not in trained
    ]
    if missing:
        raise ConfigError(
            f"Recipe.parameter_groups leaves out {len(missing)} parameters of the model, such as "
            f"{missing[0]}. Add them to a group, or set requires_grad = False."
        )


def learning_rate(train: Train, samples: int, total: int, network: str | None = None) -> float:
    """Compute the learning rate of the step that begins after `samples` of the run's `total` samples.

    `network` names one of the recipe's networks that is trained by an optimizer of its own.
    """
    peak, schedule = train.optimizer_of(network).learning_rate, train.schedule
    if samples < schedule.warmup_samples:
        return (
            peak
            * (samples + train.global_batch_size)
            / (schedule.warmup_samples + train.global_batch_size)
        )
    match schedule:
        case Cosine():
            length = max(total - schedule.warmup_samples, 1)
            done = min((samples - schedule.warmup_samples) / length, 1.0)
            low = schedule.final_share
            return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
        case Steps():
            return peak * schedule.factor ** (samples // schedule.every_samples)
        case Constant():
            return peak
        case _:
            assert_never(schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The floating-point format of a forward pass."""

    name: str
    """The value of `train.precision`, with `auto` replaced by what it means on this device."""
    dtype: torch.dtype | None
    """The data type of autocast; None computes in float32 without autocast."""
    is_scaled: bool = False
    """Whether the loss is scaled up, because gradients in fp16 would underflow to zero."""
    is_tf32: bool = False
    """Whether matrix products in float32 may use TF32."""

    @classmethod
    def of(cls, name: PrecisionName, device: torch.device) -> Precision:
        """Build the precision of `train.precision` on a device.

        Raises ConfigError for a format that needs a GPU, on a CPU.
        """
        is_cuda = device.type == "cuda"
        if name in ("fp16", "tf32") and not is_cuda:
            raise ConfigError(
                f"train.precision = {name} needs a GPU, but this worker computes on the CPU. "
                "Use auto or fp32, or request GPUs with resources.gpus."
            )
        # With autocast, operations that stay in float32 may use TF32, too.
        match name:
            case "auto":
                # bf16 on a CPU without instructions for it is up to 50 times slower than fp32.
                has_bf16 = is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
                return cls.of("bf16" if has_bf16 else "fp32", device)
            case "fp32":
                return cls(name=name, dtype=None)
            case "tf32":
                return cls(name=name, dtype=None, is_tf32=True)
            case "bf16":
                return cls(name=name, dtype=torch.bfloat16, is_tf32=True)
            case "fp16":
                return cls(name=name, dtype=torch.float16, is_scaled=True, is_tf32=True)
            case _:
                assert_never(name)

    def set_for_process(self) -> None:
        """Allow or forbid TF32 in this process."""
        torch.set_float32_matmul_precision("high" if self.is_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.is_tf32

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context in which the forward pass is computed."""
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)


class WeightAverage:
    """An exponential moving average of a network's weights and buffers.

    The decay grows from (1 + n) / (10 + n) after n updates to `decay`, as in TensorFlow's
    ExponentialMovingAverage. With a fixed decay the initial weights would dominate the average of a short
    run. The first update copies the network. Integers and booleans are always copied: rounded down, an
    average of equal indices would be another index.

    The number of updates is in host memory. The one of torch's AveragedModel is a tensor, for which the host
    would wait in each step.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        """Copy the network, before it is sharded."""
        self.network = deepcopy(network)
        self.updates = 0
        self._decay = decay

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Move the average towards the weights and buffers of the network."""
        self._move(_tensors(self.network), _tensors(network))
        self.updates += 1

    @torch.no_grad()
    def repeat_for_buffers(self, network: nn.Module) -> None:
        """Move the buffers as the newest update did; they are those from before it, the weights are not."""
        self.updates -= 1
        self._move(self.network.buffers(), network.buffers())
        self.updates += 1

    def _move(self, averages: Iterable[Tensor], currents: Iterable[Tensor]) -> None:
        averaged: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, current in zip(averages, currents, strict=True):
            if self.updates and (average.is_floating_point() or average.is_complex()):
                # torch updates all tensors of one device and data type with one kernel.
                pair = averaged.setdefault((average.device, average.dtype), ([], []))
                pair[0].append(average)
                pair[1].append(current)
            else:
                average.copy_(current)
        kept = min(self._decay, (1 + self.updates) / (10 + self.updates))
        for moved, targets in averaged.values():
            torch._foreach_lerp_(moved, targets, 1 - kept)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yield this worker's shards of the weights, and the buffers, which are not sharded."""
    for tensor in (*network.parameters(), *network.buffers()):
        yield local_shard(tensor)
