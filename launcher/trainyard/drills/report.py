"""The report of a drill, and the limits that it must meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.drills.scenarios import Scenario
from trainyard.drills.timeline import Observation, Recovery

Object = dict[str, Any]

SLACK_S = 5.0
"""The seconds of training that may be lost in addition to the checkpoint interval, for the save itself."""

UNEVEN = "epochs were recorded twice or not at all, or differ in steps or samples"
LATE = "training continued after"
TOO_SHORT = ", so the drill proves nothing: train for longer (train.epochs)"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillReport:
    """The result of a drill."""

    scenario: str
    run: str
    is_recovered: bool
    why_not: str
    struck_at_step: int
    recovery: Recovery
    attempts: int
    worker_groups: int
    has_equal_weights: bool | None
    """Whether model.pt has the SHA-256 of the undisturbed run's; None if there are no weights to compare."""
    is_elastic: bool
    """Whether the run is elastic, so that its weights cannot be compared with those of another run."""
    has_even_epochs: bool
    """Whether each epoch was recorded once, with equal numbers of steps and samples."""
    left_behind: Sequence[str]
    seen: Sequence[Observation]
    """The statuses from the last phase before the fault on. Times are relative to the fault."""
    stood_still_s: float
    """The longest time in seconds without new progress."""
    outlasted: bool
    """Whether the run was still training when the fault was over."""
    missed: Sequence[str] = ()
    """The limits that were not met, as sentences."""

    @property
    def is_passed(self) -> bool:
        """Whether the run has recovered, with equal weights and within all limits."""
        is_equal = self.is_elastic or bool(self.has_equal_weights)
        return self.is_recovered and is_equal and not self.missed

    def to_json(self) -> Object:
        """Return the report as JSON."""
        document: Object = _rounded(asdict(self) | {"is_passed": self.is_passed})
        return document


def _rounded(node: Any) -> Any:
    """Return a document with all floats rounded to two decimals."""
    if isinstance(node, dict):
        return {key: _rounded(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_rounded(value) for value in node]
    return round(node, 2) if isinstance(node, float) else node


def missed(report: DrillReport, scenario: Scenario, every_s: float | None) -> tuple[str, ...]:
    """Return the limits that a drill did not meet, as sentences."""
    recovery, found = report.recovery, []
    if recovery.again_s is not None and recovery.noticed_s is not None:
        since_end_s = recovery.again_s + min(0.0, recovery.noticed_s - scenario.lasts_s)
        if since_end_s > scenario.within_s:
            found.append(f"{LATE} {since_end_s:.0f} s, not {scenario.within_s:.0f} s")
    found += _not_shown(report, scenario)
    if not report.has_even_epochs:
        found.append(UNEVEN)
    most = 0 if scenario.has_notice else scenario.steps_lost
    if most is not None and recovery.steps_lost is not None and recovery.steps_lost > most:
        found.append(f"{recovery.steps_lost} steps lost, not {most}")
    limit = None if every_s is None else every_s + SLACK_S
    if limit and recovery.seconds_lost is not None and recovery.seconds_lost > limit:
        found.append(f"{recovery.seconds_lost:.0f} s of training lost, not {limit:.0f} s")
    if report.left_behind:
        found.append(f"left behind: {', '.join(report.left_behind)}")
    return tuple(found)


def _not_shown(report: DrillReport, scenario: Scenario) -> list[str]:
    """Return the reasons why the drill of a recovered run does not prove a recovery."""
    found: list[str] = []
    if not report.is_recovered:
        return found
    if scenario.restarts in ("always", "one") and report.recovery.again_s is None:
        found.append(f"the run had ended before its workers had to restart{TOO_SHORT}")
    if scenario.restarts == "one" and (report.attempts, report.worker_groups) != (1, 1):
        found.append(
            f"all workers restarted: {report.attempts} attempts, {report.worker_groups} worker groups"
        )
    if scenario.restarts == "never" and (report.attempts, report.worker_groups) != (1, 1):
        found.append(
            f"training was interrupted: {report.attempts} attempts, {report.worker_groups} worker groups"
        )
    if scenario.restarts == "never" and not report.outlasted:
        found.append(f"the run had ended before the fault was over{TOO_SHORT}")
    if report.stood_still_s < scenario.stands_still_s:
        found.append(
            f"training stood still for {report.stood_still_s:.0f} s, not {scenario.stands_still_s:.0f} s: "
            "the fault had no effect"
        )
    return found
