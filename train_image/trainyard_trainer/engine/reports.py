"""The metrics that rank 0 records while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainyard_trainer.config.training.metric import LOSS, is_validation
from trainyard_trainer.engine.epoch import Epoch, Interval
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.measuring.slow_workers import SlowWorkers
from trainyard_trainer.engine.measuring.timing import TimeSpent, peak_memory_bytes
from trainyard_trainer.engine.run_records import RunRecords
from trainyard_trainer.run_folder.measurements.metrics import Kind
from trainyard_trainer.run_folder.measurements.progress import (
    MetricsRecord,
    Trained,
    eta_s,
    per_second,
)

REPORT_INTERVAL_S = 1.0
"""Rank 0 records metrics about this often, in seconds."""


class Reports:
    """Records the metrics of intervals of about a second, and of epochs. Only rank 0 has it."""

    def __init__(
        self,
        records: RunRecords,
        learner: Learner,
        spent: TimeSpent,
        start: Trained,
        nodes: Sequence[str],
    ) -> None:
        """The loop begins at `start`; `nodes` are the names of the workers' nodes, by rank."""
        self.slow_workers = SlowWorkers(nodes, start.step)
        self._records = records
        self._learner = learner
        self._length = learner.length
        self._spent = spent
        self._start = start

    def is_due(self, epoch: Epoch, now: Trained) -> bool:
        """Return whether the interval is long enough, and has steps."""
        # An exchange that is repeated after the loss of a worker has no new steps.
        is_new = now.step > epoch.interval.step
        return is_new and epoch.interval.clock.seconds() >= REPORT_INTERVAL_S

    def interval(self, epoch: Epoch, now: Trained, learning_rate: float) -> bool:
        """Record the metrics since the last record; returns whether the loss is finite."""
        interval, spent = epoch.interval, self._spent
        loss, metrics = epoch.sums.since_last()
        self.count_exchange(interval, now.step)
        steps = now.step - interval.step
        samples = steps * self._length.global_batch_size
        before = interval.time_before
        validated = {name: value for name, value in now.metrics.items() if is_validation(name)}
        self._report(
            "interval",
            now,
            learning_rate=learning_rate,
            epoch=now.epoch + 1,
            metrics={LOSS: loss, **metrics} | validated,
            samples_per_s=per_second(samples, interval.clock.seconds()),
            eta_s=self._eta_s(now),
            data_wait_s=spent.since(before, "data") / steps,
            step_s=spent.since(before, "compute", "communication") / steps,
            checkpoint_stall_s=spent.since(before, "checkpoint"),
        )
        is_finite = math.isfinite(loss)
        if is_finite:
            epoch.interval = Interval(now.step, spent)
        return is_finite

    def epoch(self, epoch: Epoch, now: Trained, learning_rate: float, *, step_s: float) -> None:
        """Record the metrics of a complete epoch; `step_s` is the time of its steps, in seconds."""
        self._report(
            "epoch",
            now,
            learning_rate=learning_rate,
            epoch=now.epoch,
            metrics=now.metrics,
            samples_per_s=per_second(now.samples - epoch.samples_before, step_s),
            eta_s=0.0 if now.is_complete(self._length.epochs) else self._eta_s(now),
            checkpoint_stall_s=self._spent.since(epoch.time_before, "checkpoint"),
        )

    def count_exchange(self, interval: Interval, step: int) -> None:
        """Count the exchange of gradients in the steps of an interval up to `step` as communication."""
        self._spent.count_exchange(self._learner.exchange_s() * (step - interval.step))

    def _eta_s(self, now: Trained) -> float:
        running_s = now.train_s - self._start.train_s
        return eta_s(self._length.samples, now.samples, self._start.samples, running_s)

    def _report(self, kind: Kind, now: Trained, **measured: Any) -> None:
        self._records.report(
            MetricsRecord(
                kind=kind,
                step=now.step,
                samples=now.samples,
                memory_bytes=peak_memory_bytes(self._learner.worker),
                seconds=now.seconds,
                slow_workers=self.slow_workers.found,
                **measured,
            )
        )
