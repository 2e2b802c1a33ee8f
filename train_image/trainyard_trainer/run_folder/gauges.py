"""What Prometheus hears of a run: names, units and values, taken from a record of its progress.

Ray puts `ray_` before each name when it exports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LABELS = ("run", "attempt")
"""Of each gauge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge:
    """One number of a run, in Prometheus' base units."""

    name: str
    key: str
    """Where a record of progress.json or metrics.jsonl has it."""
    help: str
    scale: float = 1.0
    """What the record's number is multiplied with."""


GAUGES = (
    Gauge(
        name="trainyard_progress_ratio",
        key="percent",
        scale=0.01,
        help="Training samples done, as a share of the whole run (0 to 1).",
    ),
    Gauge(name="trainyard_eta_seconds", key="eta_s", help="Seconds until the run will be done."),
    Gauge(name="trainyard_epoch", key="epoch", help="The epoch under way, from 1."),
    Gauge(name="trainyard_step", key="step", help="Optimiser steps done, over all attempts."),
    Gauge(
        name="trainyard_samples", key="samples", help="Training samples done, over all attempts."
    ),
    Gauge(name="trainyard_loss", key="loss", help="Training loss of the last report."),
    Gauge(
        name="trainyard_accuracy_ratio",
        key="accuracy",
        help="Training accuracy since the epoch began (0 to 1).",
    ),
    Gauge(
        name="trainyard_validation_loss", key="val_loss", help="Loss of the last whole validation."
    ),
    Gauge(
        name="trainyard_validation_accuracy_ratio",
        key="val_accuracy",
        help="Accuracy of the last whole validation (0 to 1).",
    ),
    Gauge(
        name="trainyard_learning_rate", key="learning_rate", help="Learning rate of the last step."
    ),
    Gauge(
        name="trainyard_samples_per_second",
        key="samples_per_s",
        help="Training samples per second, of all workers together.",
    ),
    Gauge(
        name="trainyard_data_wait_seconds",
        key="data_wait_s",
        help="Seconds per step that rank 0 waited for its batch.",
    ),
    Gauge(
        name="trainyard_step_seconds",
        key="step_s",
        help="Seconds per step of rank 0, without the wait for its batch.",
    ),
    Gauge(
        name="trainyard_checkpoint_stall_seconds",
        key="checkpoint_stall_s",
        help="Seconds since the last report that training stood still for checkpoints.",
    ),
    Gauge(
        name="trainyard_memory_bytes",
        key="memory_bytes",
        help="Most memory that rank 0 has held: on its GPU, if it has one.",
    ),
    Gauge(name="trainyard_workers", key="workers", help="Workers of this attempt."),
)


def readings(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of a record by their gauges' names; what it does not know has none."""
    return {
        gauge.name: record[gauge.key] * gauge.scale
        for gauge in GAUGES
        if record.get(gauge.key) is not None
    }
