"""The report of a soak, and the limits that it must meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from trainyard.drills.report import UNEVEN

Object = dict[str, Any]

GROWTH = 1.25
"""The factor by which memory and checkpoints may grow from the first third of a soak to the last."""

ENOUGH = 9
"""The minimum number of measurements for a comparison of thirds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakStrike:
    """A fault of a soak."""

    after_s: float
    step: int
    scenario: str
    why_not: str = ""
    """Why the fault could not be injected; empty if it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """The memory and the files of an active run, measured before a fault."""

    after_s: float
    head_bytes: int
    worker_bytes: int
    """The memory of the largest worker."""
    checkpoint_bytes: int
    other_bytes: int
    """The size of all other files in the run's folder: logs and records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """The result of a soak."""

    run: str
    minutes: float
    """The time in minutes for which faults were injected."""
    seed: int
    """The seed of the order and the times of the faults."""
    epochs: int
    steps: int
    rounds: int
    attempts: int
    worker_groups: int
    strikes: Sequence[SoakStrike]
    steps_lost: int
    goodput: float | None
    """The share of the time with workers that went into kept steps; None before the end of the run."""
    why_not: str
    has_equal_weights: bool | None
    has_even_epochs: bool
    """Whether each epoch was recorded once, with equal numbers of steps and samples."""
    left_behind: Sequence[str]
    sizes: Sequence[RunSize]
    grown: dict[str, float]
    """The factor of growth from the first third to the last, for each measured quantity."""

    @property
    def missed(self) -> list[str]:
        """The limits that were not met, as sentences."""
        found = [self.why_not] if self.why_not else []
        if not any(not each.why_not for each in self.strikes):
            found.append("no fault was injected")
        if self.has_equal_weights is False:
            found.append("the weights differ from those of the undisturbed run")
        if not self.has_even_epochs:
            found.append(UNEVEN)
        found += [
            f"{what} grew by a factor of {by:.2f}" for what, by in self.grown.items() if by > GROWTH
        ]
        if self.left_behind:
            found.append(f"left behind: {', '.join(self.left_behind)}")
        return found

    @property
    def is_passed(self) -> bool:
        """Whether the weights are equal and all limits were met."""
        return bool(self.has_equal_weights) and not self.missed

    def to_json(self) -> Object:
        """Return the report as JSON."""
        return asdict(self) | {"missed": self.missed, "is_passed": self.is_passed}


def growth(sizes: Sequence[RunSize]) -> dict[str, float]:
    """Return the medians of the last third divided by those of the first. Return {} for a short soak."""
    if len(sizes) < ENOUGH:
        return {}
    third = len(sizes) // 3
    series = {
        "the head's memory": [each.head_bytes for each in sizes],
        "a worker's memory": [each.worker_bytes for each in sizes],
        "what the checkpoints take": [each.checkpoint_bytes for each in sizes],
    }
    return {
        what: median(values[-third:]) / median(values[:third]) for what, values in series.items()
    }
