"""A run that has lost a worker gives its cluster up if no place for another one comes in time.

Kubernetes keeps the pods of a node that is silent until somebody deletes the Node, and for as long KubeRay
makes no other ones. The next attempt has a cluster of its own, which needs none of these pods.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    RestartingState,
    RunningState,
)

START_VARIABLE = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""So long Ray Train waits for the places of a worker group, before it counts them anew."""
START_TIMEOUT_S = 60.0
"""Ray's own."""


class NotReplaced(Exception):
    """No place came for a worker that was lost."""


class ReplacementLimit(ControllerCallback):
    """Ray Train's controller has one. What it raises ends Ray Train's run."""

    def __init__(self, timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._since: float | None = None
        # It is asked only when Ray Train counts anew.
        os.environ.setdefault(START_VARIABLE, f"{min(START_TIMEOUT_S, timeout_s):g}")

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if isinstance(current_state, RunningState):
            self._since = None
        if not isinstance(current_state, (RestartingState, ReschedulingState)):
            return
        now = self._now()
        if self._since is None:
            self._since = now
        if now - self._since >= self._timeout_s:
            raise NotReplaced(
                f"no place came for the workers within {now - self._since:.0f} s "
                f"(faults.replacement_timeout_s {self._timeout_s:g}): Ray misses a node, and nothing has "
                "taken its place; the next attempt, if faults.retries has one left, gets a new cluster"
            )
