"""Show the progress of a run on a terminal until it ends, on a cluster or on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.submission.status import RunStatus


def show_progress(statuses: Iterable[RunStatus | str]) -> RunStatus:
    """Display each status and print each log line as it arrives; return the last status."""
    from trainyard.cli import show

    last: RunStatus | None = None
    with show.ProgressView() as view:
        for run_status in statuses:
            if isinstance(run_status, str):
                show.say(run_status)
            else:
                view.show(run_status)
                last = run_status
    assert last is not None
    return last
