"""Publish metrics of a run on Ray's endpoint for Prometheus.

Ray drops a gauge that was not set for two of its report intervals, which is 20 s. A step, a validation or the
wait for a lost worker can take longer. So a thread sets the last values again, until the block ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import ray.util.metrics

from trainyard_trainer.config.training.recipes import metrics_of
from trainyard_trainer.engine.task import AnyTask
from trainyard_trainer.errors import StorageError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.metrics import (
    GAUGE_LABELS,
    SLOW_WORKER,
    SLOW_WORKER_LABELS,
    SLOW_WORKER_MEANING,
    STEP_AGE,
    STEP_AGE_MEANING,
    RunMetric,
    gauge_values,
    run_metrics,
)

REFRESH_S = 5.0
"""Seconds between two times at which the values are set again."""


@contextmanager
def published_gauges(
    task: AnyTask, rank: int, *, refresh_s: float = REFRESH_S
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield the function that publishes the metrics of a record. Only rank 0 publishes any."""
    if rank != 0:
        yield lambda record: None
        return
    gauges = RunGauges(task)
    with _repeated(gauges.refresh, refresh_s):
        yield gauges


@contextmanager
def published_step_age(
    task: AnyTask, folder: RunFolder, *, refresh_s: float = REFRESH_S
) -> Iterator[None]:
    """Publish how long ago the run made its newest step, while the block runs.

    The driver does this, because workers that hang or are frozen publish nothing.
    """
    gauge, age = _gauge(STEP_AGE.name, STEP_AGE_MEANING, task), StepAge(task.attempt)

    def publish() -> None:
        try:
            progress = folder.read(folder.progress)
        except StorageError:
            progress = b""  # not there yet, or the storage is away for a moment
        if (seconds := age.update(progress, time.monotonic())) is not None:
            gauge.set(seconds)

    publish()
    with _repeated(publish, refresh_s):
        yield


class StepAge:
    """The seconds since the step in progress.json has changed last."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._step: int | None = None
        self._changed: float | None = None

    def update(self, progress: bytes, now: float) -> float | None:
        """Take the content of progress.json; return the seconds, or None before the attempt's first step."""
        try:
            found = json.loads(progress)
        except ValueError:  # no file, or a bucket gave the beginning of one and the end of the next
            found = {"attempt": None}
        if found["attempt"] == self._attempt and found["step"] != self._step:
            if self._step is not None:
                self._changed = now
            self._step = found["step"]
        return None if self._changed is None else now - self._changed


class RunGauges:
    """The gauges of a run's metrics, with the values of its newest records."""

    def __init__(self, task: AnyTask) -> None:
        self._task = task
        self._values: dict[str, float] = {}
        self._slow: list[dict[str, Any]] = []

    def __call__(self, record: dict[str, Any]) -> None:
        """Publish the metrics of a record."""
        self._values = self._values | gauge_values(record, self._metrics)
        self._slow = record.get("slow_workers", [])
        self.refresh()

    def refresh(self) -> None:
        """Publish the newest value of each metric again."""
        for name, value in self._values.items():
            self._gauges[name].set(value)
        for worker in self._slow:
            labels = {"rank": str(worker["rank"]), "node": worker["node"]}
            self._slow_gauge.set(worker["step_s"], tags=labels)

    @cached_property
    def _metrics(self) -> tuple[RunMetric, ...]:
        """The metrics of the run. Those of the user's recipe are known once its class is imported."""
        return run_metrics(metrics_of(self._task.config.train))

    @cached_property
    def _gauges(self) -> dict[str, ray.util.metrics.Gauge]:
        """The gauges by their names."""
        return {
            metric.gauge.name: _gauge(metric.gauge.name, metric.description, self._task)
            for metric in self._metrics
            if metric.gauge
        }

    @cached_property
    def _slow_gauge(self) -> ray.util.metrics.Gauge:
        """The gauge of workers that are slow. Ray drops it when it is not set any more."""
        return _gauge(SLOW_WORKER.name, SLOW_WORKER_MEANING, self._task, labels=SLOW_WORKER_LABELS)


def _gauge(
    name: str, description: str, task: AnyTask, *, labels: tuple[str, ...] = GAUGE_LABELS
) -> ray.util.metrics.Gauge:
    """Return a gauge with the labels of a run."""
    gauge = ray.util.metrics.Gauge(name, description, tag_keys=labels)
    gauge.set_default_tags({"run": task.config.name, "attempt": str(task.attempt)})
    return gauge


@contextmanager
def _repeated(work: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call a function again and again in another thread, while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval_s):
            work()

    thread = threading.Thread(target=repeat, name="gauges", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
