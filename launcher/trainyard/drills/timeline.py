"""Compute the cost of a fault from the observations and records of a run. Pure.

All times are seconds since 1970 by the clock of the run's pods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from trainyard.submission.status import Phase

Object = dict[str, Any]

STARTUP = {
    "lease": "lease",
    "prepare": "data",
    "ray": "ray",
    "workers": "workers",
    "model": "model",
    "first_batch": "first batch",
    "first_step": "first step",
}
"""The phases of a start in starts.jsonl, with their names in a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """The records of a run's folder that a drill evaluates."""

    attempts: Sequence[Object]
    starts: Sequence[Object]
    """The records of starts. A worker group that has made its first step has a second record, with times."""
    failures: Sequence[Object]
    replacements: Sequence[Object] = ()
    """The records of workers that were replaced while the others kept their state."""

    @property
    def worker_groups(self) -> int:
        """The number of worker groups in all attempts."""
        return len({(each["attempt"], each["group"]) for each in self.starts})


@dataclass(frozen=True, kw_only=True, slots=True)
class PodLife:
    """A Ray pod, and the times at which its states were first observed."""

    name: str
    kind: Literal["head", "worker"]
    created: float
    started: float | None = None
    """The time at which its Ray container was running."""
    ready: float | None = None
    gone: float | None = None
    """The time at which it did not exist any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A status that `watch` has shown, with its time."""

    time: float
    phase: Phase
    message: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The recovery from a fault, and its cost."""

    noticed_s: float | None
    """The seconds until the fault was noticed, or until the workers ended if they continued to train."""
    noticed_by: str
    again_s: float | None
    """The seconds from that time until the end of the next step."""
    phases: dict[str, float]
    """The seconds of each phase until the end of the next step, in the order of the phases."""
    steps_lost: int
    seconds_lost: float | None
    """The time in seconds that the lost steps had taken; None if it is unknown."""


def recover(
    records: RecordedRun, pods: Sequence[PodLife], seen: Sequence[Observation], struck: float
) -> Recovery:
    """Compute the cost of a fault, up to the first step of a worker group that started after it.

    After the replacement of a worker it counts up to the moment at which all workers can make a step.
    """
    again = _again(records, struck)
    noticed, by = _noticed(records, pods, seen, struck, again)
    phases: dict[str, float] = {}
    if again is not None and noticed is not None:
        marks = [(noticed, ""), *sorted(_marks(records, pods, noticed, again))]
        for (before, _), (moment, what) in pairwise(marks):
            phases[what] = phases.get(what, 0.0) + moment - before
    lost = steps_lost(records, struck)
    step_s = seconds_per_step(seen, struck)
    return Recovery(
        noticed_s=None if noticed is None else noticed - struck,
        noticed_by=by,
        again_s=None if again is None or noticed is None else again - noticed,
        phases=phases,
        steps_lost=lost,
        seconds_lost=None if step_s is None else lost * step_s,
    )


def steps_lost(records: RecordedRun, struck: float) -> int:
    """Return the number of reported steps that worker groups repeated after the fault."""
    reached = {each["attempt"]: each["reached_step"] for each in records.attempts}
    lost = 0
    for start in _starts(records):
        if start["time"] > struck:
            before = reached.get(start["attempt"], 0) if start["group"] == 1 else 0
            lost += max(start["reached_step"], before) - start["step"]
    return lost


def seconds_per_step(seen: Sequence[Observation], struck: float) -> float | None:
    """Return the seconds per step before the fault; None if there is too little progress to compute it."""
    steps = [(each.time, each.step) for each in seen if each.step is not None]
    before = [(time, step) for time, step in steps if time <= struck and step > 0]
    if len(before) < 2 or before[-1][1] == before[0][1]:
        return None
    (first, low), (last, high) = before[0], before[-1]
    return (last - first) / (high - low)


def stood_still_s(seen: Sequence[Observation], struck: float) -> float:
    """Return the longest time without new progress after the fault, in seconds."""
    news: list[Observation] = []
    for each in seen:
        if each.step is not None and (not news or each.step != news[-1].step):
            news.append(each)
    moments = [struck, *(each.time for each in news if each.time > struck)]
    return max((after - before for before, after in pairwise(moments)), default=0.0)


def was_training_after(seen: Sequence[Observation], moment: float) -> bool:
    """Return whether the run was observed to train after that moment."""
    return any(saw.time > moment and saw.phase == "running" for saw in seen)


def observations_around(seen: Sequence[Observation], struck: float) -> list[Observation]:
    """Return one observation for each phase and message, starting with the last one before the fault.

    Each has the last step of its phase. Times are relative to the fault.
    """
    lines: list[Observation] = []
    for each in seen:
        if lines and (lines[-1].phase, lines[-1].message) == (each.phase, each.message):
            lines[-1] = replace(lines[-1], step=each.step or lines[-1].step)
            continue
        if lines and each.time < struck:
            lines.clear()
        lines.append(replace(each, time=round(each.time - struck, 1)))
    return lines


def _starts(records: RecordedRun) -> list[Object]:
    """Return the newest record of each worker group."""
    newest = {(each["attempt"], each["group"]): each for each in records.starts}
    return list(newest.values())


def _again(records: RecordedRun, struck: float) -> float | None:
    """Return the time at which training continued with new workers after the fault, or None."""
    ends = [_ended(each) for each in _starts(records) if each["time"] > struck]
    ends += [_rejoined(each) for each in records.replacements if each["time"] > struck]
    return min((end for end in ends if end is not None), default=None)


def _rejoined(replacement: Object) -> float:
    """Return the time at which all workers had joined the process group with the replacement."""
    return float(replacement["time"] + replacement["seconds"])


def _ended(start: Object) -> float | None:
    """Return the time of the first step of a worker group, or None if it made none."""
    startup = start.get("startup")
    # The values are the start time, `began`, and the durations of the phases since then.
    return None if startup is None else float(sum(startup.values()))


def _noticed(
    records: RecordedRun,
    pods: Sequence[PodLife],
    seen: Sequence[Observation],
    struck: float,
    again: float | None,
) -> tuple[float | None, str]:
    """Return the time at which the fault was noticed, and by which component.

    The time is None if the run continued without a restart.
    """
    failures = [each for each in records.failures if each["time"] >= struck]
    left = [each["time"] for each in failures if each["rank"] is None]
    if left:
        return left[0], "Ray, by its notice"
    found = [(each["time"], "Ray Train") for each in failures]
    found += [
        (each["time"], "the other workers")
        for each in records.replacements
        if each["time"] >= struck
    ]
    found += [
        (pod.created, "KubeRay, by a new head")
        for pod in pods
        if pod.kind == "head" and pod.created > struck
    ]
    began = [
        (each["began"] - each["imports_s"], "KubeRay, by a new job") for each in records.attempts
    ]
    found += [(moment, by) for moment, by in began if moment > struck]
    phases = [each for each in seen if each.time > struck]
    found += [
        (each.time, f"KubeRay ({each.phase})")
        for each in phases
        if each.phase not in ("running", "succeeded")
    ]
    ends = [each.time for each in phases if each.phase == "succeeded"]
    until = min(ends if again is None else [*ends, again], default=math.inf)
    found = [(moment, by) for moment, by in found if moment < until]
    return min(found) if found else (None, "nobody")


def _marks(
    records: RecordedRun, pods: Sequence[PodLife], noticed: float, again: float
) -> list[tuple[float, str]]:
    """Return the end of each phase between the two times, with the name of the phase."""
    marks = []
    for pod in pods:
        if pod.created > noticed - 5:
            marks.append((pod.created, f"{pod.kind} pod made"))
            marks += [(pod.started, f"{pod.kind} pod starts")] if pod.started else []
            marks += [(pod.ready, f"{pod.kind} pod ready")] if pod.ready else []
    for attempt in records.attempts:
        marks.append((attempt["began"] - attempt["imports_s"], "job submitted"))
        marks.append((attempt["began"], "imports"))
    # The other workers notice a loss before Ray Train does.
    failed = "Ray Train notices" if records.replacements else "failed once more"
    marks += [(each["time"], failed) for each in records.failures]
    marks += [(_rejoined(each), "replacement") for each in records.replacements]
    for start in _starts(records):
        startup = dict(start.get("startup", {}))
        moment = startup.pop("began", 0.0)
        for phase, seconds in startup.items():
            moment += seconds
            marks.append((moment, STARTUP.get(phase, phase)))
    # The tolerance is needed because the end of the first step is a sum of rounded numbers.
    return [(moment, what) for moment, what in marks if noticed < moment <= again + 0.001]
