"""Decide which runs of a sweep are submitted next, from the phases of all its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainyard.submission.status import ENDED, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseChange:
    """A change of a run's phase."""

    run: str
    before: Phase | None
    """The phase before; None if the run was not submitted yet."""
    after: Phase
    """The phase now."""


class SweepSchedule:
    """The phases of the runs of a sweep, and which of them are submitted next."""

    def __init__(self, runs: Sequence[str], max_parallel: int) -> None:
        """Create a schedule with at most `max_parallel` active runs at a time."""
        self._phases: dict[str, Phase | None] = dict.fromkeys(runs)
        self._max_parallel = max_parallel

    @property
    def live(self) -> list[str]:
        """The runs that were submitted and have not ended."""
        return [run for run, phase in self._phases.items() if phase and phase not in ENDED]

    @property
    def waiting(self) -> list[str]:
        """The runs that were not submitted yet."""
        return [run for run, phase in self._phases.items() if phase is None]

    @property
    def due(self) -> list[str]:
        """The runs to submit now, as many as `max_parallel` allows."""
        return self.waiting[: max(self._max_parallel - len(self.live), 0)]

    @property
    def is_over(self) -> bool:
        """Whether all runs have ended."""
        return not self.live and not self.waiting

    def submit(self, run: str) -> None:
        """Record that a run was submitted."""
        self._phases[run] = "accepted"

    def refuse(self, run: str) -> None:
        """Record that a run cannot be submitted, which counts as failed."""
        self._phases[run] = "failed"

    def update(self, phases: Mapping[str, Phase]) -> list[PhaseChange]:
        """Set the current phases of all submissions, and return the changes.

        The phases must be newer than the last call of `submit`.
        """
        changes = []
        for run, before in self._phases.items():
            after = self._after(before, phases.get(run))
            if after is not None and after != before:
                changes.append(PhaseChange(run=run, before=before, after=after))
        for change in changes:
            self._phases[change.run] = change.after
        return changes

    def _after(self, before: Phase | None, seen: Phase | None) -> Phase | None:
        if before in ENDED:
            return before
        if before is None:
            # A run that failed in an earlier sweep is submitted again.
            return None if seen in ("failed", "stopped") else seen
        return seen or "stopped"  # its RayJob was deleted
