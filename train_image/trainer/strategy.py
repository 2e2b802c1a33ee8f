"""How a model is spread over workers, and what the workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


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


class Strategy(Protocol):
    """What the loop asks of `ddp`, and of whatever comes beside it."""

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        """The model to train, on the worker's device."""

    def state(self, model: nn.Module) -> dict[str, Any]:
        """The weights under the names that they have in the model itself."""

    def agree(self, model: nn.Module, worker: Worker) -> None:
        """Give all workers the same buffers, before they validate or save."""


class Ddp:
    """A copy of the model on each worker; gradients are averaged."""

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        model = model.to(worker.device)
        if worker.world_size == 1:
            return model
        return DistributedDataParallel(
            model,
            device_ids=[worker.device] if worker.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )

    def state(self, model: nn.Module) -> dict[str, Any]:
        return _unwrapped(model).state_dict()

    def agree(self, model: nn.Module, worker: Worker) -> None:
        # Batch norm statistics are of a worker's own last batch until the next forward pass.
        if worker.world_size > 1:
            for buffer in _unwrapped(model).buffers():
                distributed.broadcast(buffer, src=0)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


STRATEGIES: dict[str, Strategy] = {"ddp": Ddp()}
