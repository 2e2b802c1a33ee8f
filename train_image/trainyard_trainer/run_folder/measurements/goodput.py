"""Goodput: the share of a run's time that went into steps that were kept, and where the rest went.

The time is that for which the run has held its workers: from the beginning to the end of each attempt, as
GPU-hours are counted. The time between two attempts, in which the run has no pods, does not belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainyard_trainer.run_files.names import RECORD
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Trained, read_lines

KEPT = ("compute", "communication")
"""The phases of `Trained.seconds` that are steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the time of a run went, in seconds of rank 0 over all attempts."""

    total_s: float
    """For how long the run has held its workers."""
    steps_s: float
    """Steps that are part of the newest checkpoint."""
    data_s: float
    """Waiting for the batches of these steps."""
    validation_s: float
    """Validations before the newest checkpoint."""
    checkpoint_s: float
    """Waiting for checkpoints that were kept."""
    starts_s: float
    """Starts of attempts and of worker groups, up to their first step."""

    @property
    def lost_s(self) -> float:
        """The rest: steps that were made again, ends of attempts, and faults until they were noticed."""
        known = self.steps_s + self.data_s + self.validation_s + self.checkpoint_s + self.starts_s
        return max(self.total_s - known, 0.0)

    @property
    def share(self) -> float:
        """The goodput, from 0 to 1."""
        return min(self.steps_s / self.total_s, 1.0) if self.total_s > 0 else 0.0

    def to_json(self) -> dict[str, float]:
        """Return the key `goodput` of summary.json."""
        seconds = {
            "total_s": self.total_s,
            "steps_s": self.steps_s,
            "data_s": self.data_s,
            "validation_s": self.validation_s,
            "checkpoint_s": self.checkpoint_s,
            "starts_s": self.starts_s,
            "lost_s": self.lost_s,
        }
        return {"share": round(self.share, 4)} | {
            name: round(value, 1) for name, value in seconds.items()
        }


def measure(folder: RunFolder, trained: Trained, now: float) -> Goodput | None:
    """Return the goodput of a run up to now; None if its record has not begun.

    `trained` is that of the newest checkpoint, and `now` is in seconds since 1970.
    """
    if not folder.exists(folder.run):
        return None
    record = json.loads(folder.read(folder.run)).get(RECORD, [])
    return goodput_of(record, read_lines(folder, folder.starts), trained, now)


def goodput_of(
    record: Iterable[Mapping[str, Any]],
    starts: Iterable[Mapping[str, Any]],
    trained: Trained,
    now: float,
) -> Goodput:
    """Return the goodput by the record of the attempts and the lines of starts.jsonl."""
    total_s = sum(_until(each, now) - _began(each) for each in record)
    spent = trained.seconds
    return Goodput(
        total_s=total_s,
        steps_s=sum(spent.get(phase, 0.0) for phase in KEPT),
        data_s=spent.get("data", 0.0),
        validation_s=spent.get("validation", 0.0),
        checkpoint_s=spent.get("checkpoint", 0.0),
        starts_s=sum(_start_s(each["startup"]) for each in starts if "startup" in each),
    )


def _began(attempt: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(attempt["began"]).timestamp()


def _until(attempt: Mapping[str, Any], now: float) -> float:
    return now if attempt["ended"] is None else float(attempt["counted_until"])


def _start_s(startup: Mapping[str, float]) -> float:
    return sum(seconds for phase, seconds in startup.items() if phase != "began")
