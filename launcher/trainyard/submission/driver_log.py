"""The log of a run's driver in the output of its head's container.

On a standing RayCluster this output is shared by the drivers of several runs. Each line then begins with the
id of its Ray job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainyard_trainer.run_files.standing_cluster import line_prefix, standing_cluster_of

Object = dict[str, Any]

LOG_TAIL_LINES = 400
"""How many lines from the end of a driver's log are searched for its last records."""

SHARED_TAIL_LINES = 4000
"""The same where drivers share a log: each prints about one line a second."""


def tail_lines(job: Object, own: int = LOG_TAIL_LINES) -> int:
    """Return how many lines from the end of the head's output are read: `own` if no other run shares it."""
    return SHARED_TAIL_LINES if standing_cluster_of(job) is not None else own


def lines_of_driver(job: Object, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the head's output that the driver of a RayJob has written, without the prefix."""
    prefix = _prefix(job)
    for line in lines:
        if prefix is not None and line.startswith(prefix):
            yield line.removeprefix(prefix)


def lines_that_hold(job: Object, lines: Sequence[str], last: int) -> int:
    """Return how many lines at the end of the head's output have the `last` lines of a RayJob's driver."""
    prefix = _prefix(job)
    own = [
        number
        for number, line in enumerate(lines)
        if prefix is not None and line.startswith(prefix)
    ]
    return len(lines) - own[-last] if len(own) >= last else len(lines)


def _prefix(job: Object) -> str | None:
    """Return how each line of a driver begins in the head's output; None before Ray has given it an id."""
    if standing_cluster_of(job) is None:
        return ""
    its = job.get("status", {}).get("jobId")
    return line_prefix(its) if its else None


def log_of_driver(job: Object, log: str) -> str:
    """Return the part of the head's output that the driver of a RayJob has written."""
    if standing_cluster_of(job) is None:
        return log
    return "".join(f"{line}\n" for line in lines_of_driver(job, log.splitlines()))
