"""Decide whether to replace a lost worker while the others keep their state, or to restart all workers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Mapping
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

PLACE_S = 90.0
"""Seconds within which a replacement must have a place and have started. Ray Train would wait forever."""

ANSWER_S = 5.0
"""Seconds within which a living worker answers. The limits for hanging workers are for one that does not."""


NODE_S = 60.0
"""Seconds within which Ray gives up a node that does not answer; on clusters of the platform it takes 9."""

NODE_POLL_S = 0.2
"""Seconds between two looks whether it has."""


class ReplaceOrRestart(WorkerGroupCallback, ControllerCallback):
    """A callback that lets Ray Train replace lost workers only where that is possible and safe."""

    def __init__(self, place_s: float = PLACE_S) -> None:
        self._place_s = place_s
        self._group: Any = None
        self._clock: threading.Timer | None = None
        self._is_replacing = False
        self.replacements = 0
        """How often lost workers were replaced."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._end_replacement()
        self._group = None

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        status = self._group and self._group.get_latest_poll_status()
        if not status or not status.errors:
            return
        self._add_newly_lost(status)
        if reason := self._why_restart(status.errors):
            print(f"all workers are restarted from the last checkpoint: {reason}", flush=True)
            # Ray Train replaces the workers whose last status has an error; without a status, all.
            self._group._latest_poll_status = None
            return
        workers = self._group.get_workers()
        await_lost_nodes({workers[rank].metadata.node_id for rank in status.errors})
        names = " and ".join(f"worker {rank}" for rank in sorted(status.errors))
        print(f"{names} is replaced, and the other workers keep their state", flush=True)
        for rank in status.errors:
            # Ray Train would ask the others of those that it replaces one after the other.
            self._group.get_replica_groups()[rank].shutdown()
        self._is_replacing = True
        self.replacements += 1
        self._start_clock()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        # Ray Train asks for the status again when all lost workers are replaced.
        self._end_replacement()

    def _add_newly_lost(self, status: Any) -> None:
        """Add the workers to the lost ones that were lost since Ray Train has asked for their status.

        Ray Train would fail when it tells them that another worker is replaced.
        """
        asked = {
            rank: worker.execute_async(is_there)
            for rank, worker in enumerate(self._group.get_workers())
            if rank not in status.errors
        }
        for rank, answer in asked.items():
            try:
                ray.get(answer, timeout=ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayActorError as error:
                status.worker_statuses[rank].error = WorkerHealthCheckFailedError(
                    f"worker {rank} was lost", failure=error
                )

    def _start_clock(self) -> None:
        handle = self._group.get_worker_group_state().placement_group_handle

        def give_up() -> None:
            print(
                f"a replacement has not started within {self._place_s:g} s: all workers are restarted from "
                "the last checkpoint",
                flush=True,
            )
            # Ray ends the workers of a placement group that is removed, also those that wait for a place.
            handle.shutdown()

        self._clock = threading.Timer(self._place_s, give_up)
        self._clock.daemon = True
        self._clock.start()

    def _end_replacement(self) -> None:
        self._is_replacing = False
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _why_restart(self, errors: dict[int, BaseException]) -> str:
        """Return why a replacement is not possible; an empty string if it is."""
        if self._is_replacing:
            return "the replacement of a lost worker could not join the others"
        if len(errors) == len(self._group.get_workers()):
            return "no worker is left"
        for rank, error in sorted(errors.items()):
            if not is_lost_process(error):
                return f"the error of worker {rank} is not the loss of its process"
        return ""


def await_lost_nodes(nodes: Collection[str]) -> None:
    """Wait until Ray has given up those of the nodes that do not answer.

    A lost connection to a worker is noticed earlier than the loss of its node. Until Ray knows of that, it
    would start the replacement there.
    """
    deadline = time.monotonic() + NODE_S
    while time.monotonic() < deadline:
        alive = [each for each in ray.nodes() if each["Alive"] and each["NodeID"] in nodes]
        if all(map(answers, alive)):
            return
        time.sleep(NODE_POLL_S)


def answers(node: Mapping[str, Any]) -> bool:
    """Whether Ray's process of a node accepts connections."""
    place = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(place, timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def is_there() -> None:
    """Answer from a worker's process."""


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
