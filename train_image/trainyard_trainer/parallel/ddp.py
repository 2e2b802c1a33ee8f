"""DDP: each worker has a copy of the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainyard_trainer.parallel.torch_strategy import TorchStrategy
from trainyard_trainer.parallel.waits import Waits
from trainyard_trainer.parallel.worker import Worker

EXCHANGE_SAMPLE_STEPS = 20
"""DDP measures the time of communication once in this number of steps."""


class DdpStrategy(TorchStrategy):
    """DDP: each worker has a copy of the model, and gradients are averaged."""

    is_sharded = False
    shards_weights = False

    def __init__(self, *, accumulates: bool) -> None:
        """Store whether steps have several passes, so that DDP's buckets hold the gradients all the time.

        Otherwise passes without communication would have gradients of their own beside the buckets.
        """
        self._accumulates = accumulates

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        if worker.world_size == 1:
            return network
        if self._accumulates:
            _set_gradients_to_zero(network)
        model = _Ddp(
            network,
            waits=worker.waits,
            accumulates=self._accumulates,
            device_ids=[worker.device] if worker.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        model._set_ddp_runtime_logging_sample_rate(EXCHANGE_SAMPLE_STEPS)
        return model

    def clear_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(model, _Ddp):
            model.clear_gradients(optimizer)
        else:
            optimizer.zero_grad(set_to_none=True)

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def reshard(self, network: nn.Module) -> None: ...

    def exchange_s(self, model: nn.Module) -> float:
        return _unhidden_s(model, "avg_")

    def last_exchange_s(self, model: nn.Module) -> float:
        return _unhidden_s(model, "")


class _Ddp(DistributedDataParallel):
    """DDP that counts the time in which this worker waits for the buffers of rank 0.

    With `accumulates`, its buckets hold the gradients all the time.
    """

    def __init__(
        self, network: nn.Module, *, waits: Waits, accumulates: bool, **options: Any
    ) -> None:
        super().__init__(network, **options)
        self._waits = waits
        self._accumulates = accumulates
        self._has_stepped = False

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of the step before, or set them to 0 in the buckets."""
        if self._accumulates and self._has_stepped and not self._has_rebuilt_buckets:
            # The next forward pass arranges the buckets anew. This frees the old ones before.
            _set_gradients_to_zero(self.module)
        else:
            optimizer.zero_grad(set_to_none=not self._accumulates)
        self._has_stepped = True

    def _sync_buffers(self) -> None:
        with self._waits.counted(self.device):
            super()._sync_buffers()


def _set_gradients_to_zero(network: nn.Module) -> None:
    """Set gradients to 0 without memory of their own: DDP makes existing ones views of its buckets."""
    for weight in network.parameters():
        if weight.requires_grad:
            weight.grad = weight.new_zeros(()).expand_as(weight)


def _unhidden_s(model: nn.Module, prefix: str) -> float:
    """Return the seconds of communication that the backward pass did not hide, as DDP has measured them."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    measured = model._get_ddp_logging_data()
    if f"{prefix}backward_comm_time" not in measured:  # until a step has been measured
        return 0.0
    hidden = measured[f"{prefix}backward_compute_comm_overlap_time"]
    return max(measured[f"{prefix}backward_comm_time"] - hidden, 0) / 1e9
