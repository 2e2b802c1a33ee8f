"""What a soak has shown, and whether that is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from trainyard.drills.report import UNEVEN

Object = dict[str, Any]

GROWTH = 1.25
"""What memory and checkpoints may have grown by in the last third of a soak over the first one."""
ENOUGH = 9
"""Sizes from which thirds can be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakStrike:
    """A strike, and what it was done to."""

    after_s: float
    step: int
    scenario: str
    why_not: str = ""
    """Why it did not come about: what it was aimed at was gone by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """What a run that trains holds."""

    after_s: float
    head_bytes: int
    worker_bytes: int
    """Of the largest."""
    checkpoint_bytes: int
    other_bytes: int
    """Of all else in the run's folder: logs and records, which tell of each attempt and step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """What came of a soak."""

    run: str
    minutes: float
    """How long it was struck."""
    seed: int
    """Of the strikes and their times."""
    epochs: int
    steps: int
    rounds: int
    attempts: int
    worker_groups: int
    strikes: Sequence[SoakStrike]
    steps_lost: int
    why_not: str
    has_equal_weights: bool | None
    has_even_epochs: bool
    """Whether it has each epoch once, and all of as many steps and samples."""
    left_behind: Sequence[str]
    sizes: Sequence[RunSize]
    grown: dict[str, float]
    """Last third over the first one."""

    @property
    def missed(self) -> list[str]:
        """The bounds that were not held, in words."""
        found = [self.why_not] if self.why_not else []
        if not any(not each.why_not for each in self.strikes):
            found.append("it was not struck once")
        if self.has_equal_weights is False:
            found.append("its weights differ from those of the undisturbed run")
        if not self.has_even_epochs:
            found.append(UNEVEN)
        found += [f"{what} grew {by:.2f}-fold" for what, by in self.grown.items() if by > GROWTH]
        if self.left_behind:
            found.append(f"left behind: {', '.join(self.left_behind)}")
        return found

    @property
    def is_passed(self) -> bool:
        return bool(self.has_equal_weights) and not self.missed

    def to_json(self) -> Object:
        return asdict(self) | {"missed": self.missed, "is_passed": self.is_passed}


def growth(sizes: Sequence[RunSize]) -> dict[str, float]:
    """The median of the last third over that of the first one; nothing of a soak that was too short."""
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
