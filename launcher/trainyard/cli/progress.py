"""The live display of a run, on a cluster or on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.submission.watch import Sight


def show_progress(sights: Iterable[Sight | str]) -> Sight:
    """Display sights and log lines as they come; returns the last sight."""
    from trainyard.cli import show

    last: Sight | None = None
    with show.ProgressView() as view:
        for sight in sights:
            if isinstance(sight, str):
                show.say(sight)
            else:
                view.show(sight)
                last = sight
    assert last is not None
    return last
