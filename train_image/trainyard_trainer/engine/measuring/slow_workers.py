"""Find workers that need much longer for a step than the others.

Workers wait for each other in each step, so that all steps take as long as those of the slowest worker. What
differs is how long a worker is busy by itself: it waits for its batch, and computes until it waits for the
others.

Within the passes of a sharded model (FSDP2, DeepSpeed) computing and waiting cannot be told apart, so these
do not count: there only a worker is found that is slow between them, such as in loading its data.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.measuring.timing import TimeSpent
from trainyard_trainer.run_folder.measurements.progress import SlowWorker

WINDOW_S = 60.0
"""Workers are compared by their mean over a window of at least so many seconds."""

WINDOW_STEPS = 100
"""A window has at least so many steps. DDP measures the exchange of gradients in one step of 20."""

SLOW_FACTOR = 2.0
"""A worker is slow if its time per step is at least so many times the median of all workers."""

LEAST_SHARE = 0.2
"""Nor is a worker slow whose time above the median is less than this share of a step."""


class OwnTime:
    """Measures how long a worker is busy with a step by itself. Each worker has one."""

    def __init__(self, spent: TimeSpent, learner: Learner, step: int) -> None:
        self._spent = spent
        self._learner = learner
        self._step = step
        self._before = spent.snapshot()
        self._waited_before = learner.worker.waits.seconds()

    def per_step(self, step: int) -> float:
        """Return the mean seconds per step since the call before; `step` is the number of steps done.

        It is 0 without a new step, as in an exchange that is repeated after the loss of a worker.
        """
        if step <= self._step:
            return 0.0
        steps, waited = step - self._step, self._learner.worker.waits.seconds()
        spent_s = self._spent.since(self._before, "data", "compute", "communication")
        own_s = (spent_s - (waited - self._waited_before)) / steps - self._learner.last_exchange_s()
        self._step, self._before, self._waited_before = step, self._spent.snapshot(), waited
        return max(own_s, 0.0)


class SlowWorkers:
    """Finds slow workers by the times that all workers tell in each exchange. Only rank 0's is used."""

    def __init__(
        self, nodes: Sequence[str], step: int, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`nodes` are the names of the workers' nodes, by rank, and `step` is the number of steps done."""
        self.found: tuple[SlowWorker, ...] = ()
        """Those that were slow in the last window."""
        self._nodes = nodes
        self._now = now
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._first = self._last = step
        self._began = self._now()
        self._seconds = [0.0] * len(self._nodes)

    def add(self, step: int, own_s: Sequence[float]) -> None:
        """Take each worker's mean seconds per step, by rank, of the steps since the last call."""
        for rank, seconds in enumerate(own_s):
            self._seconds[rank] += seconds * (step - self._last)
        self._last = step
        steps, passed_s = step - self._first, self._now() - self._began
        if passed_s >= WINDOW_S and steps >= WINDOW_STEPS:
            means = [seconds / steps for seconds in self._seconds]
            self.found = slow_workers(means, self._nodes, step_s=passed_s / steps)
            self._begin(step)


def slow_workers(
    own_s: Sequence[float], nodes: Sequence[str], *, step_s: float
) -> tuple[SlowWorker, ...]:
    """Return the workers that need much longer for a step than the median worker.

    `own_s` are the seconds per step that each worker needs by itself, and `step_s` those of the whole step.
    """
    # Of two workers the faster one is the median: otherwise none could need twice as much.
    median_s = statistics.median_low(own_s)
    return tuple(
        SlowWorker(rank=rank, node=nodes[rank], step_s=seconds, median_s=median_s)
        for rank, seconds in enumerate(own_s)
        if seconds >= SLOW_FACTOR * median_s and seconds - median_s >= LEAST_SHARE * step_s
    )
