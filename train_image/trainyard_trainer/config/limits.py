"""The deadlines of a run: of the whole run, and of the start of its pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainyard_trainer.config.section import Section

MARGIN_S = 60
"""Seconds before the deadline of a run at which its workers are asked to save a checkpoint and stop."""

Seconds = Annotated[int, Field(gt=0, le=10**9)]
"""A deadline in seconds. The sum of two of them fits into a field of a RayJob (int32)."""


class Limits(Section):
    """How long a run may take. These numbers do not belong to the run's identity."""

    max_run_s: Seconds | None = None
    """Seconds that the run may take, counted from the start of its first driver over all attempts of a
    submission. 60 s before that (after half of the time, if it is below 120 s) the workers save a checkpoint
    and the run stops; a new submission goes on from there. Default: no limit."""

    max_start_s: Seconds | None = None
    """Seconds within which all pods of an attempt must be ready; after that the attempt has failed. The time
    in a queue does not count. Not used on a laptop. Default: `job.preRunningDeadlineSeconds` of the
    platform."""


def stop_after_s(max_run_s: int) -> float:
    """Return after how many seconds a run is stopped, so that it has ended at its deadline.

    >>> stop_after_s(3600), stop_after_s(100)
    (3540, 50.0)
    """
    return max(max_run_s - MARGIN_S, max_run_s / 2)
