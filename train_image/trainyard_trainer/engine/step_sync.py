"""When workers talk: rank 0 decides, about once a second, what all of them do at the same step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainyard_trainer.checkpointing.checkpoint import Rule
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.run_folder.progress import Length, Trained

TALK_INTERVAL_S = 1.0
"""Between two talks: each costs an exchange over the network and makes the host wait for its device."""

LAST_CALL_S = 10.0
"""A machine that goes away sooner than this is left, after a second checkpoint: no step is lost with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notices:
    """What a worker may be told while it trains; every worker asks at the same steps."""

    drain_s: Callable[[], float | None] = lambda: None
    """Seconds until a machine of the run goes away; None while all stay."""
    is_stopping: Callable[[], bool] = lambda: False
    """Whether the run is to be saved and left; rank 0 asks."""


@dataclass(frozen=True, slots=True)
class Order:
    """What all workers do now."""

    is_save: bool
    is_urgent: bool
    """The save must be complete before training goes on: a machine goes away."""
    is_stop: bool
    """Save and leave: the run is to stop, or goes on without this machine."""
    is_bad: bool
    """The loss is no number any more."""


class Talk:
    """Keeps the steps at which workers talk, and rank 0's reasons to save."""

    def __init__(
        self,
        rule: Rule,
        worker: Worker,
        notices: Notices,
        length: Length,
        start: Trained,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rule = rule
        self._worker = worker
        self._notices = notices
        self._length = length
        self._now = now
        self._next_step = start.step + 1
        self._talked = (start.step, self._now())
        self._saved = (start.samples, self._now())
        self._is_noticed = False

    def is_due(self, step: int) -> bool:
        return step >= self._next_step

    def note_epoch(self, now: Trained) -> None:
        """An epoch has ended, and was saved if that was due."""
        if now.epoch % self._rule.every_epochs == 0:
            self._saved = (now.samples, self._now())

    def hold(self, now: Trained, *, is_saving: bool, is_bad: bool) -> Order:
        """Exchange what each worker knows; rank 0 says whether it is saving or has seen a bad loss."""
        drain, leave = self._calls_now()
        stop, save, wait = False, False, 0
        if self._worker.rank == 0:
            stop = self._notices.is_stopping()
            save = self._is_save_due(now) and not is_saving
            wait = self._steps_to_wait(now, now.samples if save else self._saved[0])
        message = torch.tensor(
            [drain, leave, stop, save, is_bad, wait],
            dtype=torch.int64,
            device=self._worker.device,
        )
        drain, leave, stop, save, is_bad, wait = self._worker.sum(message).tolist()
        self._next_step = now.step + wait
        self._talked = (now.step, self._now())
        if drain or stop or save:
            self._saved = (now.samples, self._now())
        return Order(
            is_save=bool(drain or stop or save),
            is_urgent=bool(drain or stop),
            is_stop=bool(stop or leave),
            is_bad=bool(is_bad),
        )

    def _calls_now(self) -> tuple[bool, bool]:
        """Whether a notice asks for a checkpoint, once when it comes; and when its time is up, to leave.

        Until then training goes on: KubeRay makes another pod only when this one has ended.
        """
        left_s = self._notices.drain_s()
        if left_s is None:
            self._is_noticed = False
            return False, False
        is_last = left_s < LAST_CALL_S
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
        """Steps until the next talk: about an interval, less where samples since `saved` call for a save."""
        step, talked_at = self._talked
        step_s = (self._now() - talked_at) / max(now.step - step, 1)
        steps = max(1, round(TALK_INTERVAL_S / step_s))
        if self._rule.every_samples is None:
            return steps
        due = saved + self._rule.every_samples - now.samples
        return max(1, min(steps, math.ceil(due / self._length.global_batch_size)))
