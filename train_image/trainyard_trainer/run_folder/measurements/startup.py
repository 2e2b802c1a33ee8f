"""The time of each phase of an attempt's start. The driver sends it with the task to rank 0.

A worker group that takes the place of another has a start of its own, from the moment at which the failure
was noticed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path


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
    loop_began: float | None = None
    """time.time() when the training loop began, which measures its own time; None before."""

    def reach(self, phase: str, when: float | None = None) -> None:
        """This phase has ended, and the next begins; only the first time counts."""
        if phase not in self.seconds:
            elapsed = (time.time() if when is None else when) - self.began
            self.seconds[phase] = elapsed - sum(self.seconds.values())

    def to_json(self) -> dict[str, float]:
        rounded = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
        return {"began": round(self.began, 3)} | rounded
