"""Search the driver's log of a failed attempt: its lines, its last error, and patterns in both."""

from __future__ import annotations

import re

from trainyard.diagnosis.failure import Match, evidence, last_match
from trainyard.diagnosis.snapshot import Snapshot
from trainyard.submission.status import error_lines
from trainyard_trainer.run_files.driver_output import ERROR, PROGRESS, SUMMARY, last_record

LOG = "driver's log"


TRACEBACK_LINES = 5
"""Number of lines that are shown of the end of a traceback or log."""


_RECORD_LINE = re.compile(rf"^({PROGRESS}|{SUMMARY})\{{")


def failed_lines(snapshot: Snapshot) -> list[str]:
    """Return the lines of a failed attempt's log without progress records; no lines while it still runs."""
    if not snapshot.is_broken:
        return []
    return [line for line in snapshot.driver_log.splitlines() if not _RECORD_LINE.match(line)]


def last_error(snapshot: Snapshot) -> list[str]:
    """Return the program's last `error: ...` with its details, or the summary's error if no log is left."""
    if not snapshot.is_broken:
        return []
    lines = error_lines(snapshot.driver_log)
    if lines and lines[0].startswith(ERROR):
        return lines
    summary = last_record(snapshot.driver_log, SUMMARY) or snapshot.summary or {}
    return [f"{ERROR}{summary['error']}"] if summary.get("error") else []


def match_error(snapshot: Snapshot, pattern: str, cause: str = "") -> Match | None:
    """Match a pattern in the program's last error. By default the cause is the error's first line."""
    lines = last_error(snapshot)
    if not lines or not re.search(pattern, "\n".join(lines)):
        return None
    return Match(
        cause=cause or lines[0].removeprefix(ERROR),
        evidence=tuple(evidence(LOG, line) for line in lines),
    )


def match_log(snapshot: Snapshot, pattern: str, cause: str) -> Match | None:
    """Match a pattern in any line of a failed attempt's log."""
    found = last_match(failed_lines(snapshot), pattern)
    return None if found is None else Match(cause=cause, evidence=(evidence(LOG, found[0]),))
