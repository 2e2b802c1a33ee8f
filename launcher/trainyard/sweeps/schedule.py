"""How the runs of a sweep stand -> which of them are next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainyard.submission.status import ENDED, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseChange:
    """A run stands otherwise than before."""

    run: str
    before: Phase | None
    """None for a run that was not submitted yet."""
    after: Phase


class SweepSchedule:
    """How its runs stand -> which are to be submitted next."""

    def __init__(self, runs: Sequence[str], max_parallel: int) -> None:
        """`max_parallel`: the most that may be live at one time."""
        self._phases: dict[str, Phase | None] = dict.fromkeys(runs)
        self._at_once = max_parallel

    @property
    def live(self) -> list[str]:
        """Runs that were submitted, and may still do something."""
        return [run for run, phase in self._phases.items() if phase and phase not in ENDED]

    @property
    def waiting(self) -> list[str]:
        """Runs that were not submitted yet."""
        return [run for run, phase in self._phases.items() if phase is None]

    @property
    def due(self) -> list[str]:
        """Runs to submit now."""
        return self.waiting[: max(self._at_once - len(self.live), 0)]

    @property
    def is_over(self) -> bool:
        return not self.live and not self.waiting

    def submit(self, run: str) -> None:
        """It was submitted."""
        self._phases[run] = "accepted"

    def refuse(self, run: str) -> None:
        """It cannot be submitted."""
        self._phases[run] = "failed"

    def update(self, phases: Mapping[str, Phase]) -> list[PhaseChange]:
        """All submissions there are, as they stand now; none of them older than the last `submit`."""
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
            # One that failed under an earlier command is submitted again.
            return None if seen in ("failed", "stopped") else seen
        return seen or "stopped"  # somebody deleted it
