"""What the start of an attempt is made of. It goes with the task from the driver to rank 0.

A worker group that takes the place of another has a start of its own, from the moment at which the failure
was noticed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.data.batch import Batch, Batches


def process_age_s() -> float:
    """Seconds since this process was started."""
    # The name, in brackets, may hold blanks and brackets itself.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True, slots=True)
class Startup:
    """Seconds from a beginning to the end of the first step, phase by phase."""

    began: float
    """time.time() when the attempt began, or the failure of the worker group before was noticed."""
    seconds: dict[str, float] = field(default_factory=dict)

    def reach(self, phase: str, when: float | None = None) -> None:
        """This phase has ended, and the next begins; only the first time counts."""
        if phase not in self.seconds:
            elapsed = (time.time() if when is None else when) - self.began
            self.seconds[phase] = elapsed - sum(self.seconds.values())

    def to_json(self) -> dict[str, float]:
        rounded = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
        return {"began": round(self.began, 3)} | rounded


class Watched:
    """Batches whose first two requests end the start: between them lies the first step."""

    def __init__(
        self, batches: Batches, startup: Startup, started: Callable[[], None] = lambda: None
    ) -> None:
        """`started` is called once, when the start has ended."""
        self._batches = batches
        self._startup = startup
        self._started = started
        self._is_started = False

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for batch in self._batches.epoch(epoch):
            self._startup.reach("first_batch")
            yield batch
            if not self._is_started:
                self._is_started = True
                self._startup.reach("first_step")
                self._started()

    def state(self) -> dict[str, torch.Tensor]:
        return self._batches.state()
