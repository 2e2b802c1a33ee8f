"""How weights follow gradients: optimiser, learning rate, precision, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainyard_trainer.config.train import Cosine, Sgd, Steps, Train
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.strategy import local


def build_optimizer(
    model: nn.Module, train: Train, device: torch.device, *, is_sharded: bool = False
) -> torch.optim.Optimizer:
    """The optimiser, with all its arithmetic in one kernel where there is one."""
    wanted = train.optimizer
    is_fused = device.type in ("cpu", "cuda")
    if isinstance(wanted, Sgd):
        return torch.optim.SGD(
            model.parameters(),
            lr=wanted.learning_rate,
            momentum=wanted.momentum,
            weight_decay=wanted.weight_decay,
            fused=is_fused and not is_sharded,  # torch has none of SGD for DTensors
        )
    return torch.optim.AdamW(
        model.parameters(),
        lr=wanted.learning_rate,
        weight_decay=wanted.weight_decay,
        fused=is_fused,
    )


def learning_rate(train: Train, samples: int, total: int) -> float:
    """The learning rate of the step that begins after so many samples, of `total` in the whole run."""
    peak, schedule = train.optimizer.learning_rate, train.schedule
    if samples < schedule.warmup_samples:
        return (
            peak
            * (samples + train.global_batch_size)
            / (schedule.warmup_samples + train.global_batch_size)
        )
    if isinstance(schedule, Cosine):
        length = max(total - schedule.warmup_samples, 1)
        done = min((samples - schedule.warmup_samples) / length, 1.0)
        low = schedule.final_share
        return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
    if isinstance(schedule, Steps):
        return peak * schedule.factor ** (samples // schedule.every_samples)
    return peak


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The numbers of a forward pass."""

    name: str
    dtype: torch.dtype | None
    """Of autocast; None for plain float32."""
    is_scaled: bool = False
    """Gradients of fp16 vanish unless the loss is scaled up."""
    is_tf32: bool = False

    @classmethod
    def of(cls, wanted: str, device: torch.device) -> Precision:
        """What the config's word means on this device. Raises ConfigError."""
        is_cuda = device.type == "cuda"
        if wanted == "auto":
            # bf16 on a CPU without instructions for it is up to 50 times slower than fp32.
            has_bf16 = is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            wanted = "bf16" if has_bf16 else "fp32"
        if wanted in ("fp16", "tf32") and not is_cuda:
            raise ConfigError(
                f"train.precision = {wanted} needs a GPU, this worker computes on the CPU. "
                "Use auto or fp32, or resources.gpus."
            )
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return cls(
            name=wanted,
            dtype=dtypes.get(wanted),
            is_scaled=wanted == "fp16",
            # What autocast leaves in float32 may be TF32, too.
            is_tf32=wanted != "fp32",
        )

    def set_for_process(self) -> None:
        torch.set_float32_matmul_precision("high" if self.is_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.is_tf32

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)


def average_of(network: nn.Module, decay: float) -> AveragedModel:
    """A moving average of the network's weights and buffers, which begins with the first update.

    Early on it keeps less of itself, (1 + n) / (10 + n) after n updates, as TensorFlow's
    ExponentialMovingAverage does: initial weights would weigh on a short run for long.
    """

    def update(
        average: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int
    ) -> None:
        count = int(num_averaged)
        kept = min(decay, (1 + count) / (10 + count))
        # Of weights that are shared out each worker averages its share; buffers are whole.
        shares = [[local(tensor) for tensor in tensors] for tensors in (average, current)]
        get_ema_multi_avg_fn(kept)(*shares, num_averaged)

    return AveragedModel(network, multi_avg_fn=update, use_buffers=True)
