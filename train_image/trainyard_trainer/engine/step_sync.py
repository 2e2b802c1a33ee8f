"""Synchronise the workers about once a second: rank 0 decides whether to save, stop or abort."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainyard_trainer.checkpointing.retention import RetentionRule
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

MICROSECONDS = 1_000_000
"""Times are exchanged in whole microseconds, since the signals are integers."""

SYNC_INTERVAL_S = 1.0
"""Seconds between two exchanges. Each is an all-reduce, and makes the host wait for its device."""

LEAVE_BEFORE_DRAIN_S = 10.0
"""Workers save again and leave when a node is drained in fewer seconds than this, so that no step is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Signals from outside of the training loop, which are read at each exchange."""

    drain_s: Callable[[], float | None] = lambda: None
    """Returns the seconds until a node of the run is drained; None while no node is draining."""
    is_stopping: Callable[[], bool] = lambda: False
    """Returns whether the run was asked to save and stop. Only rank 0 calls it."""


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """What all workers do after an exchange."""

    is_save: bool
    """Save a checkpoint."""
    is_urgent: bool
    """Wait until the checkpoint is complete before training goes on, because a node will be drained."""
    is_stop: bool
    """Leave after saving: the run was asked to stop, or a node is about to be drained."""
    is_diverged: bool
    """Abort: the loss is NaN or infinite."""
    own_s: tuple[float, ...] = ()
    """The seconds per step of each worker by itself, by rank."""


class StepSync:
    """Decides at which steps the workers exchange signals, and when rank 0 wants a checkpoint."""

    def __init__(
        self,
        rule: RetentionRule,
        worker: Worker,
        signals: Signals,
        length: Length,
        start: Trained,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rule = rule
        self._worker = worker
        self._signals = signals
        self._length = length
        self._now = now
        self._next_step = start.step + 1
        self._exchanged = (start.step, self._now())
        self._saved = (start.samples, self._now())
        self._is_noticed = False

    def is_due(self, step: int) -> bool:
        """Whether the workers exchange signals after this step; the same on all workers."""
        return step >= self._next_step

    def repeat(self, step: int) -> None:
        """Exchange signals after this step, again if that was done: not all workers may have got them."""
        self._next_step = step

    def note_saved(self, samples: int) -> None:
        """Record up to which sample the newest checkpoint is."""
        self._saved = (samples, self._now())

    def note_epoch(self, now: Trained) -> None:
        """Record that an epoch has ended and was saved, if a checkpoint was due."""
        if now.epoch % self._rule.every_epochs == 0:
            self._saved = (now.samples, self._now())

    def exchange(
        self, now: Trained, *, is_saving: bool, is_diverged: bool, own_s: float | None = None
    ) -> SyncDecision:
        """Exchange the workers' signals and return rank 0's decision. All workers must call it alike.

        `is_saving` and `is_diverged` are what rank 0 knows: a save is in progress, the loss is not finite.
        `own_s` is what the decision tells of all workers; it tells nothing if it is None.
        """
        drain, leave = self._drain_requests()
        stop, save, wait = False, False, 0
        if self._worker.rank == 0:
            stop = self._signals.is_stopping()
            save = self._is_save_due(now) and not is_saving
            wait = self._steps_to_wait(now, now.samples if save else self._saved[0])
        # In the sum, each worker's time is alone in its place.
        times = [0] * (0 if own_s is None else self._worker.world_size)
        if own_s is not None:
            times[self._worker.rank] = round(own_s * MICROSECONDS)
        message = torch.tensor(
            [drain, leave, stop, save, is_diverged, wait, *times],
            dtype=torch.int64,
            device=self._worker.device,
        )
        drain, leave, stop, save, is_diverged, wait, *times = self._worker.sum(message).tolist()
        self._next_step = now.step + wait
        self._exchanged = (now.step, self._now())
        if drain or stop or save:
            self._saved = (now.samples, self._now())
        return SyncDecision(
            is_save=bool(drain or stop or save),
            is_urgent=bool(drain or stop),
            is_stop=bool(stop or leave),
            is_diverged=bool(is_diverged),
            own_s=tuple(time / MICROSECONDS for time in times),
        )

    def _drain_requests(self) -> tuple[bool, bool]:
        """Return whether a drain calls for a checkpoint now, and whether this worker must leave now.

        A drain calls for a checkpoint when it is announced, and again just before the deadline. Until then
        training goes on, because KubeRay creates a replacement pod only after this one has ended.
        """
        left_s = self._signals.drain_s()
        if left_s is None:
            self._is_noticed = False
            return False, False
        is_last = left_s < LEAVE_BEFORE_DRAIN_S
        is_first, self._is_noticed = not self._is_noticed, True
        return is_first or is_last, is_last

    def _is_save_due(self, now: Trained) -> bool:
        samples, saved_at = self._saved
        rule = self._rule
        is_old = rule.every_s is not None and self._now() - saved_at >= rule.every_s
        return is_old or (
            rule.every_samples is not None and now.samples - samples >= rule.every_samples
        )

    def _steps_to_wait(self, now: Trained, saved: int) -> int:
        """Return the steps until the next exchange: about one interval, or fewer if a save is due."""
        step, exchanged_at = self._exchanged
        steps = 1  # of an exchange that is repeated after the loss of a worker
        if now.step > step:
            step_s = (self._now() - exchanged_at) / (now.step - step)
            steps = max(1, round(SYNC_INTERVAL_S / step_s))
        if self._rule.every_samples is None:
            return steps
        due = saved + self._rule.every_samples - now.samples
        return max(1, min(steps, math.ceil(due / self._length.global_batch_size)))
