"""How a model is spread over workers, and what the workers tell each other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

EXCHANGE_SAMPLE_STEPS = 20
"""DDP times one step in so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process of a run. With more than one, torch's process group is up before the loop starts."""

    rank: int = 0
    world_size: int = 1
    device: torch.device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all workers, in place."""
        if self.world_size > 1:
            distributed.all_reduce(values)
        return values

    def from_rank_zero(self, value: Any) -> Any:
        """What rank 0 passed here, on every worker."""
        if self.world_size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, device=self.device)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """What each worker passed here, by rank, on every worker."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values


class Strategy(Protocol):
    """What the loop asks of `ddp`, and of whatever comes beside it."""

    def wrap(self, network: nn.Module, worker: Worker) -> nn.Module:
        """The model whose backward pass exchanges gradients, around the network on the worker's device."""

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backward passes in it only add up gradients."""

    def agree(self, network: nn.Module, worker: Worker) -> None:
        """Give all workers the same buffers, before they validate or save."""

    def exchange_s(self, model: nn.Module) -> float:
        """Seconds per step for which the exchange was not hidden behind the backward pass."""


class Ddp:
    """A copy of the model on each worker; gradients are averaged."""

    def wrap(self, network: nn.Module, worker: Worker) -> nn.Module:
        if worker.world_size == 1:
            return network
        model = DistributedDataParallel(
            network,
            device_ids=[worker.device] if worker.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        model._set_ddp_runtime_logging_sample_rate(EXCHANGE_SAMPLE_STEPS)
        return model

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def agree(self, network: nn.Module, worker: Worker) -> None:
        # Batch norm statistics are of a worker's own last batch until the next forward pass.
        if worker.world_size > 1:
            for buffer in network.buffers():
                distributed.broadcast(buffer, src=0)

    def exchange_s(self, model: nn.Module) -> float:
        if not isinstance(model, DistributedDataParallel):
            return 0.0
        measured = model._get_ddp_logging_data()
        if "avg_backward_comm_time" not in measured:  # until a step has been timed
            return 0.0
        hidden = measured["avg_backward_compute_comm_overlap_time"]
        return max(measured["avg_backward_comm_time"] - hidden, 0) / 1e9


STRATEGIES: dict[str, Strategy] = {"ddp": Ddp()}
