"""How a submission waits for its places on a standing RayCluster: as its driver has told last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainyard.submission.status import RunStatus
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

Object = dict[str, Any]

RUNS_SHOWN = 3
"""How many of the runs before it are named."""


def with_place(run_status: RunStatus, place: Mapping[str, Any] | None, job: Object) -> RunStatus:
    """Complete the status of a running submission that waits for its places; `place` is the last record."""
    if run_status.phase != "running" or not (message := place_text(place, job)):
        return run_status
    return replace(run_status, phase="queued", message=message)


def place_text(place: Mapping[str, Any] | None, job: Object) -> str:
    """Say where a run stands in the queue of its standing RayCluster, and behind whom; empty if in none."""
    if place is None or not place["position"]:
        return ""
    names = list(place["behind"])
    more = len(names) - RUNS_SHOWN
    named = ", ".join(names[:RUNS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return (
        f"waits for {place['workers']} of the {place['places']} places of cluster {standing_cluster_of(job)} "
        f"at position {place['position']}, behind {named}"
    )
