"""End the attempt if no resources for a lost worker's replacement become available in time.

Kubernetes keeps the pods of an unreachable node until the Node object is deleted, and KubeRay creates no
replacements until then. The next attempt gets a new cluster, which does not depend on these pods.
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
"""The variable for how long Ray Train waits for the resources of a worker group before it tries again."""

START_TIMEOUT_S = 60.0
"""Ray Train's default of this variable, in seconds."""


class NotReplaced(Exception):
    """An error: no resources became available for a lost worker's replacement."""


class ReplacementLimit(ControllerCallback):
    """A callback of Ray Train's controller that ends the run after a timeout by raising NotReplaced."""

    def __init__(self, timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._since: float | None = None
        # Ray Train calls this callback only when it tries again.
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
                f"the workers could not be restarted within {now - self._since:.0f} s "
                f"(faults.replacement_timeout_s {self._timeout_s:g}): a node is lost, and no other node has "
                "free resources for them; the next attempt, if faults.retries has one left, gets a new "
                "cluster"
            )
