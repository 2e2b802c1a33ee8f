"""Decide whether to replace a lost worker while the others keep their state, or to restart all workers."""

from __future__ import annotations

import threading
from typing import Any

import ray
import ray.exceptions
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    ReplicaGroupCallback,
    WorkerGroupCallback,
)

PLACE_S = 45.0
"""Seconds within which a replacement must have started on its node. Ray Train itself would wait forever."""


class ReplaceOrRestart(WorkerGroupCallback, ReplicaGroupCallback, ControllerCallback):
    """A callback that lets Ray Train replace a lost worker only where that is possible and safe."""

    def __init__(self) -> None:
        self._group: Any = None
        self._clock: threading.Timer | None = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._stop_clock()
        self._group = None

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        status = self._group and self._group.get_latest_poll_status()
        if not status or not status.errors:
            return
        if reason := self._why_restart(status.errors):
            print(f"all workers are restarted from the last checkpoint: {reason}", flush=True)
            # Ray Train replaces the workers whose last status has an error; without a status, all.
            self._group._latest_poll_status = None
            return
        (rank,) = status.errors
        print(f"worker {rank} is replaced, and the other workers keep their state", flush=True)
        handle = self._group.get_worker_group_state().placement_group_handle
        # Ray ends the workers of a placement group that is removed, and those that wait for a place in it.
        self._clock = threading.Timer(PLACE_S, handle.shutdown)
        self._clock.daemon = True
        self._clock.start()

    def after_replica_group_start(self, replica_group: Any) -> None:
        self._stop_clock()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _why_restart(self, errors: dict[int, BaseException]) -> str:
        """Return why a replacement is not possible; an empty string if it is."""
        if self._clock is not None:
            return "the replacement of a lost worker could not join the others"
        if len(errors) > 1:
            return f"{len(errors)} workers have failed"
        ((rank, error),) = errors.items()
        if not is_lost_process(error):
            return f"the error of worker {rank} is not the loss of its process"
        if rank == 0:
            return "worker 0 was lost, which alone has the metrics and the buffers of the model"
        node = self._group.get_workers()[rank].metadata.node_id
        if node not in {each["NodeID"] for each in ray.nodes() if each["Alive"]}:
            return f"the node of worker {rank} was lost"
        return ""


def is_lost_process(error: BaseException) -> bool:
    """Whether a worker's error says that its process has ended, and not that its code has failed."""
    return isinstance(error, WorkerHealthCheckFailedError) and isinstance(
        error.health_check_failure, (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
    )


class WatchDrains(PreemptionCallback, ReplicaGroupCallback):
    """Ray Train's watch for nodes that go away. It starts again when a worker was replaced."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group
        super().after_worker_group_start(worker_group)

    def after_replica_group_start(self, replica_group: Any) -> None:
        super().after_worker_group_start(self._group)
