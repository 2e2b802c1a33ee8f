"""Tables and progress for people; the only module that imports rich.

Tables go to standard output, progress to standard error. Without a terminal, progress is plain lines. rich is
imported where it is used: not every command needs it, and its bars take as long to import as all the rest.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainyard.cli.record_lines import clock_text, progress_text, with_percent
from trainyard.submission.status import ENDED, Phase, RunStatus
from trainyard_trainer.run_files.record_text import (
    GOODPUT_HEADINGS,
    HEADINGS,
    attempt_row,
    goodput_rows,
)
from trainyard_trainer.run_files.sizes import size_text

if TYPE_CHECKING:  # most commands need none of these, whose imports take half a second
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from trainyard.drills.final_errors import FinalErrorReport
    from trainyard.drills.report import DrillReport
    from trainyard.drills.soak_report import SoakReport
    from trainyard.drills.timeline import Recovery
    from trainyard.planning.capacity.gpus import GpuNode
    from trainyard.planning.capacity.nodes import PodHolding
    from trainyard.planning.reasons import Reason
    from trainyard.submission.overview import Column

Object = dict[str, Any]

PLAIN_LINE_S = 5.0
"""Minimum seconds between two lines of progress where there is no terminal."""

EQUAL = {True: "equal", False: "DIFFERENT", None: "-"}
"""The words for a comparison: equal, different, or nothing to compare with."""


@cache
def _progress_console() -> Console:
    """Return the console on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a line of progress or explanation on standard error."""
    _progress_console().print(text, markup=False, soft_wrap=True)


def say_set_aside(run: str, name: str | None) -> None:
    """Print under which name the folder of a run is now; None if the run had no folder."""
    say(f"the folder of run {run} is now {name}" if name else f"run {run} has no folder yet")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output. Cells are never cut; without a terminal each row is one line."""
    if not sys.stdout.isatty():
        sys.stdout.writelines(_lines([headings, *rows]))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        grid.add_column(heading, overflow="fold")
    for row in rows:
        grid.add_row(*(escape(cell) for cell in row))
    console.print(grid)


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as text with aligned columns; rich would need a second for a thousand rows."""
    cells = [[cell.replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(aligned).rstrip() + "\n"


def submissions_table(rows: Sequence[Object], columns: Sequence[Column]) -> None:
    """Print some columns of rows of submissions; an unknown value is a dash."""
    table(
        [column.name for column in columns],
        [[_cell(column, row[column.name]) for column in columns] for row in rows],
    )


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return "-"
    return clock_text(value) if column.is_duration else str(value)


def record_table(record: Sequence[Object]) -> None:
    """Print where and with what each attempt of a run ran."""
    table(HEADINGS, [attempt_row(attempt) for attempt in record])


def goodput_table(goodput: Object) -> None:
    """Print where the time of a run's workers went."""
    table(GOODPUT_HEADINGS, goodput_rows(goodput))


def plan_table(reasons: Sequence[Reason]) -> None:
    """Print a plan, each number with its reason."""
    table(("", "value", "because"), [(row.name, row.value, row.why) for row in reasons])


def gpu_tables(sums: Sequence[tuple[str, str, Counter[str]]], nodes: Sequence[GpuNode]) -> None:
    """Print the GPUs of each pool, and of each node with the pods that use them."""
    if not nodes:
        return
    counts = ("nodes", "total", "used", "free")
    table(
        ("pool", "resource", *counts),
        [
            (pool, resource, *(str(sum_of[key]) for key in counts))
            for pool, resource, sum_of in sums
        ],
    )
    print()
    table(
        ("node", "pool", "resource", "total", "used", "free", "held by"),
        [
            (
                one.node + ("" if one.is_open else " (closed)"),
                ", ".join(one.pools) or "-",
                one.resource,
                str(one.total),
                str(one.used),
                str(one.free),
                ", ".join(holder_text(holder) for holder in one.holders) or "-",
            )
            for one in nodes
        ],
    )


def holder_text(holder: PodHolding) -> str:
    """Return the user of GPUs as text, such as `run digits (team/digits-abc-worker): 8`.

    `Pending` follows for a pod that does not run yet, for example because its node cannot mount a volume.
    """
    pod = f"{holder.namespace}/{holder.pod}"
    user = f"run {holder.run} ({pod})" if holder.run else pod
    return f"{user}: {int(holder.amount)}{'' if holder.phase == 'Running' else f' {holder.phase}'}"


def drill_table(report: DrillReport) -> None:
    """Print the report of a drill, and what `watch` showed during it."""
    recovery = report.recovery
    rows = [
        ("scenario", report.scenario),
        ("recovered", "yes" if report.is_recovered else f"NO: {report.why_not}"),
        ("struck at step", str(report.struck_at_step)),
        ("steps lost", _with_seconds(recovery)),
        ("noticed after", f"{_seconds(recovery.noticed_s)} by {recovery.noticed_by}"),
        ("training again after", _seconds(recovery.again_s)),
        *((f"- {what}", _seconds(seconds)) for what, seconds in recovery.phases.items()),
        ("attempts", str(report.attempts)),
        ("worker groups", str(report.worker_groups)),
        ("watch stood still for", _seconds(report.stood_still_s)),
        ("trained on when it was over", "yes" if report.outlasted else "no"),
        ("weights as without it", EQUAL[report.has_equal_weights]),
        ("steps, samples of each epoch", EQUAL[report.has_even_epochs]),
        ("left behind", ", ".join(report.left_behind) or "nothing"),
        ("verdict", "passed" if report.is_passed else "; ".join(report.missed) or "FAILED"),
    ]
    table(("", ""), rows)
    print()
    table(
        ("after", "phase", "up to step", "message"),
        [
            (_seconds(each.time), each.phase, str(each.step or "-"), each.message)
            for each in report.seen
        ],
    )


def final_error_table(report: FinalErrorReport) -> None:
    """Print what a run with an error that a retry cannot cure has cost."""
    rows = [
        ("scenario", report.scenario),
        ("phase", report.phase),
        ("error", report.message),
        ("clusters", str(report.clusters)),
        ("pods", str(report.pods)),
        ("held, pods together", _seconds(report.held_s)),
        ("failed after", _seconds(report.ended_s)),
        ("left behind", ", ".join(report.left_behind) or "nothing"),
        ("verdict", "passed" if report.is_passed else "; ".join(report.missed)),
    ]
    table(("", ""), rows)


def soak_table(report: SoakReport) -> None:
    """Print the report of a soak, and how often each fault was injected."""
    landed = Counter(each.scenario for each in report.strikes if not each.why_not)
    rows = [
        ("struck for", f"{report.minutes:g} min, by seed {report.seed}"),
        ("strikes", f"{landed.total()}, and {len(report.strikes) - landed.total()} came too late"),
        *((f"- {scenario}", str(count)) for scenario, count in landed.most_common()),
        ("epochs, steps", f"{report.epochs}, {report.steps}"),
        ("rounds", str(report.rounds)),
        ("attempts", str(report.attempts)),
        ("worker groups", str(report.worker_groups)),
        ("steps made again", str(report.steps_lost)),
        ("goodput", "-" if report.goodput is None else f"{report.goodput:.1%}"),
        ("weights as undisturbed", EQUAL[report.has_equal_weights]),
        ("steps, samples of each epoch", EQUAL[report.has_even_epochs]),
        *((f"growth of {what}", f"{by:.2f}-fold") for what, by in report.grown.items()),
        ("left behind", ", ".join(report.left_behind) or "nothing"),
        ("verdict", "passed" if report.is_passed else "; ".join(report.missed) or "FAILED"),
    ]
    table(("", ""), rows)


def _with_seconds(recovery: Recovery) -> str:
    seconds = recovery.seconds_lost
    return str(recovery.steps_lost) + ("" if seconds is None else f" ({seconds:.1f} s of training)")


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


class UploadView:
    """Prints how much of a run's code has been uploaded: every few seconds, and at the end."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._said_at = time.monotonic()

    def __call__(self, arrived: int, length: int) -> None:
        now, is_all = time.monotonic(), arrived == length
        if is_all or now - self._said_at >= PLAIN_LINE_S:
            self._said_at = now
            come = size_text(length) if is_all else f"{size_text(arrived)} of {size_text(length)}"
            say(f"code: {come} uploaded to the folder of run {self._run}")


class ProgressView:
    """Displays the progress of one run: a line for each phase with its duration, and a progress bar."""

    def __init__(self) -> None:
        self._task: TaskID | None = None
        self._phase: Phase | None = None
        self._phase_since = time.monotonic()
        self._message = ""
        self._printed_at = float("-inf")
        self._last: Object | None = None

    @cached_property
    def _bar(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        return Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f}%"),
            # A narrow terminal wraps the text: rich would cut it off, and its end tells what is left.
            TextColumn("{task.description}", markup=False, table_column=Column()),
            console=_progress_console(),
            transient=True,
        )

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def show(self, run_status: RunStatus) -> None:
        """Update the display to a new status."""
        if run_status.phase != self._phase:
            self._next_phase(run_status.phase)
        if run_status.message and run_status.message != self._message:
            self._message = run_status.message
            say(f"  {run_status.message}")
        if run_status.progress is not None and run_status.progress != self._last:
            self._last = run_status.progress
            self._advance(run_status.progress)

    def _next_phase(self, phase: Phase) -> None:
        now = time.monotonic()
        if self._phase is not None:
            say(f"{self._phase} for {clock_text(now - self._phase_since)}")
        if phase in ENDED and self._task is not None and self._last is not None:
            say(progress_text(self._last))
        self._phase, self._phase_since = phase, now
        if phase not in ENDED:
            say(f"{phase} ...")

    def _advance(self, progress: Object) -> None:
        if not _progress_console().is_terminal:
            now = time.monotonic()
            if now - self._printed_at >= PLAIN_LINE_S or progress.get("percent") == 100:
                self._printed_at = now
                say(with_percent(progress))
            return
        text = progress_text(progress)
        if self._task is None:
            # User code does not report its length.
            total = 100 if "percent" in progress else None
            self._task = self._bar.add_task(text, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=progress.get("percent", 0), description=text)
