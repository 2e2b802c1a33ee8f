"""The lines that the driver prints for programs: progress, summary, errors.

The trainer prints them, `trainyard watch`, `logs` and `explain` read them.
"""

from __future__ import annotations

import json
import re
from typing import Any

FRONT_END_VARIABLE = "TRAINYARD_FRONT_END"
"""The environment variable with the process id of the command that started a program of the trainer on the
same machine. While that command lives, it holds open a pipe, which is the program's standard input, or the
file descriptor whose number follows a colon: `4711` or `4711:5`."""

PROGRESS = "progress "
"""The beginning of a line with the newest progress report, as JSON."""

SUMMARY = "summary "
"""The beginning of the line with which an attempt ends, as JSON."""

PROBE = "probe "
"""The beginning of the line with which the preflight pod tells what it found, as JSON."""

WAITING = "waiting "
"""The beginning of a line that tells, as JSON, where the run stands in the queue of a standing RayCluster:
`position` (0 if it has its places), `workers`, `places` and `behind`, the names of the runs before it."""

ERROR = "error: "
"""The beginning of the line that says why a program failed; details follow, indented."""

FINAL_FAILURE = "final failure "
"""The beginning of the line after an error that a retry cannot cure, as JSON with the exit code."""

STORAGE = "storage: "
"""The beginning of an error that an operation on the run's storage failed with."""

STOPPED = "stopped: all is saved up to step "
"""The beginning of the last line of a driver that was asked to stop and whose workers have saved."""

AT_LIMIT = "the run stopped at its limit"
"""The beginning of the error of a run that has used up `limits.max_run_s`."""

BY_SIGNAL = "the run was stopped by SIGTERM"
"""The beginning of the error of a run that SIGTERM has stopped."""

INTERRUPTED = "the run was interrupted"
"""The beginning of the error of a run that Ctrl-C has stopped."""

STOPPING_ERRORS = (AT_LIMIT, BY_SIGNAL, INTERRUPTED)
"""The beginnings of the errors of a run that was stopped and has not failed: it goes on when it is started
again. Its outcome in summary.json is `stopped`."""

STOPPED_STEP = re.compile(rf"{STOPPED}(\d+)")
"""Finds the step of `STOPPED`."""

WORKER_FAILED = re.compile(r"worker \d+ of group \d+ failed: .*")
"""Finds the line that tells the failure of a worker; `worker_failed` makes it."""


WORKER_HANGS = re.compile(r"worker (?P<rank>\d+) on (?P<node>\S+) hangs: (?P<what>.*)")
"""Finds the line that tells that a worker hangs; `worker_hangs` makes it."""


def record_line(prefix: str, record: dict[str, Any]) -> str:
    """Return the line for a record: a prefix of this module, and JSON."""
    return f"{prefix}{json.dumps(record)}"


def record_of(line: str, prefix: str) -> dict[str, Any] | None:
    """Return the record of a line with this prefix, or None for any other line, a cut one too."""
    if not line.startswith(prefix):
        return None
    try:
        record = json.loads(line.removeprefix(prefix))
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def worker_failed(rank: int, group: int, error: str) -> str:
    """Return the line that tells the failure of a worker of a worker group."""
    return f"worker {rank} of group {group} failed: {error}"


def worker_hangs(rank: int, node: str, words: str) -> str:
    """Return the line that tells that a worker hangs, for how long and where."""
    return f"worker {rank} on {node} hangs: {words}"


def last_record(log: str, prefix: str) -> dict[str, Any] | None:
    """Return the last record with this prefix in a driver's log, or None."""
    records = (record_of(line, prefix) for line in reversed(log.splitlines()))
    return next((record for record in records if record is not None), None)
