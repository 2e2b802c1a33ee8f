"""Goodput: the share of the workers' time that went into steps that were kept, and where the rest went.

All of it is in worker-seconds: a second in which 8 workers were held counts 8. The parts add up to the time
of all attempts. The time between two attempts, in which the run has no workers, stands beside them.

The worker groups divide an attempt: where the failure of one was noticed, the start of the next begins. The
time of a group has three pieces:

1. its start, up to its training loop;
2. its training loop, whose seconds rank 0 measures and records about once a second;
3. what follows the last record, until the failure was noticed or the attempt ended.

The seconds of the loop were kept if the run has continued from a checkpoint that holds them. The others went
into steps that were trained again.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trainyard_trainer.run_files.names import RECORD
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Reached, Trained, loop_s, read_lines

Seconds = Mapping[str, float]
"""Seconds by name: the phases of the loop or of a start, or parts of the whole time."""

LOOP_PARTS = {
    "steps": ("compute", "communication"),
    "data": ("data",),
    "validation": ("validation",),
    "checkpoint": ("checkpoint",),
}
"""The parts of the time in the loop, each with the phases of `Trained.seconds` that belong to it."""

START_PHASES = ("imports", "lease", "prepare", "ray", "workers", "model")
"""The phases of a start before the training loop."""

OTHER = "other"
"""What a start took beside its phases."""

REPLACEMENTS = "replacements"
"""Waiting for the replacements of lost workers, while the other workers kept their state."""

UNFINISHED = "unfinished"
"""Starts that never reached the training loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptTime:
    """The time of one attempt; times are in seconds since 1970."""

    number: int
    began: float
    """When its process started."""
    ended: float
    """When it ended; of one that was killed, its last sign of life. Of one that runs, now."""
    workers: int
    """The workers that it asked for, which count where it ended before any had started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTime:
    """The time of one worker group; times are in seconds since 1970."""

    attempt: int
    workers: int
    began: float
    """When the failure of the group before was noticed. The first group begins with its attempt."""
    loop_began: float | None
    """When its training loop began; None if it made no step."""
    resumed: Seconds
    """`Trained.seconds` of the checkpoint from which it started."""
    reached_before_s: float
    """How far the group before it had come, as seconds in the loop."""
    start: Seconds = field(default_factory=dict)
    """The seconds of each phase of its start."""
    replacements_s: float = 0.0
    """The seconds in which it waited for the replacements of lost workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the time of all workers went, in worker-seconds over all attempts."""

    steps_s: float = 0.0
    """Steps that are part of the newest checkpoint."""
    data_s: float = 0.0
    """Waiting for the batches of these steps."""
    validation_s: float = 0.0
    """Validations before the newest checkpoint."""
    checkpoint_s: float = 0.0
    """Waiting for checkpoints that were kept."""
    again_s: float = 0.0
    """Work after the checkpoint from which the run went on: its steps were, or will be, trained again."""
    unnoticed_s: float = 0.0
    """From the last record of a worker group to the moment at which its failure was noticed."""
    ends_s: float = 0.0
    """From the last record of an attempt to its end: the delivery of the model, or a fault that ended it."""
    starts: Seconds = field(default_factory=dict)
    """Starts of attempts and of worker groups up to their training loop, by phase."""
    between_attempts_s: float = 0.0
    """Seconds between two attempts, which are not part of the whole time: the run had no workers."""

    @property
    def starts_s(self) -> float:
        """The seconds of all phases of starts."""
        return sum(self.starts.values())

    @property
    def parts(self) -> dict[str, float]:
        """All parts by their keys in summary.json."""
        return {
            "steps_s": self.steps_s,
            "data_s": self.data_s,
            "validation_s": self.validation_s,
            "checkpoint_s": self.checkpoint_s,
            "starts_s": self.starts_s,
            "again_s": self.again_s,
            "unnoticed_s": self.unnoticed_s,
            "ends_s": self.ends_s,
        }

    @property
    def total_s(self) -> float:
        """For how long the run has held its workers."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The goodput, from 0 to 1."""
        return self.steps_s / self.total_s if self.total_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the key `goodput` of summary.json, in which the rounded parts add up to `total_s`."""
        starts = {name: round(seconds, 3) for name, seconds in self.starts.items()}
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        parts["starts_s"] = round(sum(starts.values()), 3)
        return {
            "share": round(self.share, 4),
            "total_s": round(sum(parts.values()), 3),
            **parts,
            "starts": starts,
            "between_attempts_s": round(self.between_attempts_s, 3),
        }


def goodput_of(
    attempts: Sequence[AttemptTime],
    groups: Sequence[GroupTime],
    trained: Seconds,
    reached_s: float = 0.0,
) -> Goodput:
    """Return where the time of these attempts went. All are in the order of time.

    `trained` is `Trained.seconds` of the newest checkpoint, and `reached_s` is how far the newest group has
    come, as seconds in the loop.
    """
    kept = kept_seconds(groups, trained)
    points = [*(loop_s(group.resumed) for group in groups), loop_s(trained)]
    reached = [*(group.reached_before_s for group in groups[1:]), reached_s]
    parts: defaultdict[str, float] = defaultdict(float)
    starts: defaultdict[str, float] = defaultdict(float)
    for attempt in attempts:
        own = [number for number, group in enumerate(groups) if group.attempt == attempt.number]
        if not own:
            starts[UNFINISHED] += attempt.workers * max(attempt.ended - attempt.began, 0.0)
            continue
        for number, began, ended in _spans(attempt, own, groups):
            group = groups[number]
            furthest = max(reached[number], points[number + 1]) - points[number]
            span = _divide(group, began, ended, kept[number], furthest)
            for name, seconds in span.kept.items():
                parts[name] += group.workers * seconds
            for name, seconds in span.start.items():
                starts[name] += group.workers * seconds
            parts["again"] += group.workers * span.again_s
            rest = "ends" if number == own[-1] else "unnoticed"
            parts[rest] += group.workers * span.rest_s
    return Goodput(
        **{f"{name}_s": seconds for name, seconds in parts.items()},
        starts=dict(starts),
        between_attempts_s=sum((max(b.began - a.ended, 0.0) for a, b in pairwise(attempts)), 0.0),
    )


def kept_seconds(groups: Sequence[GroupTime], trained: Seconds) -> list[dict[str, float]]:
    """Return the seconds of each group's loop that the newest checkpoint holds, by the keys of LOOP_PARTS.

    A group that starts from a checkpoint drops what groups before it have trained beyond that.
    """
    kept: list[dict[str, float]] = [{} for _ in groups]
    line: list[int] = []  # the groups whose work leads to the newest checkpoint
    for number, group in enumerate(groups):
        line = [*_up_to(line, groups, group.resumed), number]
    line = _up_to(line, groups, trained)
    points = [*(groups[number].resumed for number in line), trained]
    for number, (since, until) in zip(line, pairwise(points), strict=True):
        kept[number] = {
            part: max(sum(until.get(name, 0.0) - since.get(name, 0.0) for name in phases), 0.0)
            for part, phases in LOOP_PARTS.items()
        }
    return kept


def _up_to(line: list[int], groups: Sequence[GroupTime], point: Seconds) -> list[int]:
    """Return the groups that had started before a point of the training."""
    return [number for number in line if loop_s(groups[number].resumed) < loop_s(point)]


def _spans(
    attempt: AttemptTime, own: Sequence[int], groups: Sequence[GroupTime]
) -> Iterator[tuple[int, float, float]]:
    """Yield the groups of an attempt with the time at which each began and ended.

    They fill the attempt without gaps, also where the clocks of two machines differ.
    """
    end = max(attempt.ended, attempt.began)
    marks = [attempt.began]
    for number in own[1:]:
        marks.append(min(max(groups[number].began, marks[-1]), end))
    for number, (began, ended) in zip(own, pairwise([*marks, end]), strict=True):
        yield number, began, ended


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """How the time of one group divides, in seconds."""

    start: Seconds
    kept: Seconds
    again_s: float
    rest_s: float


def _divide(
    group: GroupTime, began: float, ended: float, kept: Seconds, furthest_s: float
) -> _Span:
    """Divide the time of a group. `furthest_s` is how far it has come, as seconds in its loop.

    What a worker has measured goes before what two clocks say. The last record that is known can be that of
    a group before, so no group has more time in its loop than there was.
    """
    whole_s, kept_s = ended - began, sum(kept.values())
    loop_began = ended if group.loop_began is None else group.loop_began
    start_s = min(max(loop_began - began, 0.0), whole_s)
    in_loop_s = min(max(kept_s, min(furthest_s, whole_s - start_s)), whole_s)
    start_s = min(start_s, whole_s - in_loop_s)
    scale = min(in_loop_s / kept_s, 1.0) if kept_s else 0.0
    rest_s = max(whole_s - start_s - in_loop_s, 0.0)
    replacements_s = min(group.replacements_s, rest_s)
    start = _phases_of_start(group, start_s)
    return _Span(
        start=start | {REPLACEMENTS: replacements_s} if replacements_s else start,
        kept={name: seconds * scale for name, seconds in kept.items()},
        again_s=max(in_loop_s - kept_s, 0.0),
        rest_s=rest_s - replacements_s,
    )


def _phases_of_start(group: GroupTime, start_s: float) -> dict[str, float]:
    """Return the seconds of each phase of a start, which together are `start_s`."""
    if group.loop_began is None:
        return {UNFINISHED: start_s}
    phases: dict[str, float] = {}
    for name in START_PHASES:
        left = start_s - sum(phases.values())
        phases[name] = min(group.start.get(name, 0.0), max(left, 0.0))
    phases[OTHER] = max(start_s - sum(phases.values()), 0.0)
    return phases


# The files of a run's folder.


def measure(folder: RunFolder, trained: Trained, now: float) -> Goodput | None:
    """Return the goodput of a run up to now.

    None if its record has not begun, or if a version of the trainer has begun the run that did not
    record enough. `trained` is that of the newest checkpoint, and `now` is in seconds since 1970.
    """
    if not folder.exists(folder.run):
        return None
    record = json.loads(folder.read(folder.run)).get(RECORD, [])
    if not record:
        return None
    lines = {line["attempt"]: line for line in read_lines(folder, folder.attempts)}
    # A group that has made its first step has a second line, with more in it.
    starts = {(line["attempt"], line["group"]): line for line in read_lines(folder, folder.starts)}
    replaced: defaultdict[tuple[int, int], float] = defaultdict(float)
    for line in read_lines(folder, folder.replacements):
        replaced[line["attempt"], line["group"]] += line["seconds"]
    if any("reached_loop_s" not in line for line in (*lines.values(), *starts.values())):
        return None
    return goodput_of(
        [_attempt_time(each, lines[each["attempt"]], now) for each in record],
        [_group_time(starts[key], lines[key[0]], replaced[key]) for key in sorted(starts)],
        trained.seconds,
        Reached.by(folder).loop_s,
    )


def _attempt_time(record: Mapping[str, Any], line: Mapping[str, Any], now: float) -> AttemptTime:
    """Return the time of an attempt by its record in run.json and its line of attempts.jsonl."""
    return AttemptTime(
        number=record["attempt"],
        began=line["began"] - line["imports_s"],
        ended=now if record["ended"] is None else record["counted_until"],
        workers=line["workers"],
    )


def _group_time(
    start: Mapping[str, Any], attempt: Mapping[str, Any], replacements_s: float
) -> GroupTime:
    """Return the time of a worker group by its line of starts.jsonl and its attempt's of attempts.jsonl."""
    phases, before = start.get("startup", {}), start["reached_loop_s"]
    if start["group"] == 1:
        # Since then, the driver has written over the last record of the attempt before.
        phases = phases | {"imports": attempt["imports_s"]}
        before = max(before, attempt["reached_loop_s"])
    return GroupTime(
        attempt=start["attempt"],
        workers=start["workers"],
        began=start["began"],
        loop_began=start.get("loop_began"),
        resumed=start["seconds"],
        reached_before_s=before,
        start=phases,
        replacements_s=replacements_s,
    )


class RunningGoodput:
    """The goodput of a run while a worker group trains, as if all of its steps were kept."""

    def __init__(
        self,
        folder: RunFolder,
        start: Trained,
        workers: int,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Store the arguments; `start` is the progress from which the group has started."""
        self._folder = folder
        self._start = start
        self._workers = workers
        self._now = now
        self._before: tuple[float, Goodput | None] | None = None

    def __call__(self, seconds: Seconds) -> float | None:
        """Return the goodput up to now, from 0 to 1; None where `measure` tells none.

        `seconds` are `Trained.seconds` of the newest step.
        """
        now = self._now()
        if self._before is None:
            measured = self._folder.outlast(lambda: measure(self._folder, self._start, now))
            self._before = now, measured
        then, before = self._before
        if before is None:
            return None
        own = _steps_s(seconds) - _steps_s(self._start.seconds)
        total_s = before.total_s + self._workers * (now - then)
        steps_s = before.steps_s + self._workers * own
        return min(steps_s / total_s, 1.0) if total_s > 0 else None


def _steps_s(seconds: Seconds) -> float:
    return sum(seconds.get(name, 0.0) for name in LOOP_PARTS["steps"])
