"""What the start of an attempt is made of. It goes with the task from the driver to rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trainer.data.batch import Batch, Batches


@dataclass(kw_only=True, slots=True)
class Startup:
    """Seconds from the beginning of an attempt to the end of its first step, phase by phase."""

    began: float
    """time.time() at the beginning."""
    seconds: dict[str, float] = field(default_factory=dict)

    def reach(self, phase: str) -> None:
        """This phase has ended, and the next begins; only the first time counts."""
        if phase not in self.seconds:
            self.seconds[phase] = time.time() - self.began - sum(self.seconds.values())

    def to_json(self) -> dict[str, float]:
        rounded = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
        return {"began": round(self.began, 3)} | rounded


class Watched:
    """Batches whose first two requests end the start: between them lies the first step."""

    def __init__(self, batches: Batches, startup: Startup) -> None:
        self._batches = batches
        self._startup = startup

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for batch in self._batches.epoch(epoch):
            self._startup.reach("first_batch")
            yield batch
            self._startup.reach("first_step")

    def state(self) -> dict[str, torch.Tensor]:
        return self._batches.state()
