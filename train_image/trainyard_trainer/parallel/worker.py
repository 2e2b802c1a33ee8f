"""One process of a run, and the exchange of values with the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from trainyard_trainer.parallel.activity import Activity
from trainyard_trainer.parallel.waits import Waits

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The backends of the process group, by the type of a worker's device. Workers with GPUs also exchange
tensors in host memory: the norms of offloaded shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process of a run. If there are several, the process group is initialised before the loop starts."""

    rank: int = 0
    world_size: int = 1
    device: torch.device
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)
    """How long this worker has waited for the others while it made steps."""

    @property
    def activity(self) -> Activity:
        """What this worker is doing now."""
        return self.waits.activity

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all workers, in place, and return it."""
        if self.world_size > 1:
            distributed.all_reduce(values)
        return values

    def from_rank_zero(self, value: Any) -> Any:
        """Return on every worker the value that rank 0 has passed."""
        return self.from_rank(0, value)

    def from_rank(self, rank: int, value: Any) -> Any:
        """Return on every worker the value that the worker of this rank has passed."""
        if self.world_size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=rank, device=self.device)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """Return on every worker the values that all workers have passed, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values
