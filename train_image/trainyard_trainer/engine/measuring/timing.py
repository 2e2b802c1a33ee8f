"""Where a worker's time goes, and how much memory it has used."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard_trainer.parallel.activity import Activity
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import TIME_PHASES


class Clock:
    """A stopwatch that starts when it is created."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.start


class TimeSpent:
    """The seconds that a worker has spent in each of TIME_PHASES, over all attempts."""

    def __init__(self, before: dict[str, float], *, startup: float, activity: Activity) -> None:
        """Continue from the seconds of earlier attempts; `startup` is added to the phase of that name.

        `activity` is told each phase.
        """
        self._activity = activity
        self._seconds = dict.fromkeys(TIME_PHASES, 0.0) | before
        self._seconds["startup"] += max(startup, 0.0)

    @contextmanager
    def on(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase. If the block fails, it belongs to the start that follows."""
        clock = Clock()
        try:
            with self._activity.on(phase):
                yield
        except BaseException:
            phase = "startup"
            raise
        finally:
            self._seconds[phase] += clock.seconds()

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self._seconds[phase] += seconds

    def count_exchange(self, seconds: float) -> None:
        """Move seconds from the phase `compute` to `communication`: they were spent on gradient exchange."""
        seconds = min(seconds, self._seconds["compute"])
        self._seconds["compute"] -= seconds
        self._seconds["communication"] += seconds

    def snapshot(self) -> dict[str, float]:
        """Return the seconds of each phase so far."""
        return dict(self._seconds)

    def since(self, before: dict[str, float], *phases: str) -> float:
        """Return the seconds spent in some phases since a snapshot."""
        return sum(self._seconds[phase] - before[phase] for phase in phases)


def peak_memory_bytes(worker: Worker) -> int:
    """Return the peak memory of this worker: on its GPU if it has one, else of its process."""
    if worker.device.type == "cuda":
        return torch.cuda.max_memory_allocated(worker.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
