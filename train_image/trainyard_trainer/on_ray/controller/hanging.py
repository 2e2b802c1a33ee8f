"""Find workers that hang, and end their processes, so that they count as lost.

Ray notices a process that has ended, but not one that has stopped moving, and all other workers wait for it
until their collective operation times out. So the controller asks each worker every few seconds what it is
doing. A worker hangs that for some time

* has not answered, or
* has been loading a batch or computing, while another worker has waited for the others.

One worker alone may also be saving a checkpoint, validating or starting, which takes as long as it takes.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from ray.train.v2._internal.execution.callback import ReplicaGroupCallback, WorkerGroupCallback

from trainyard_trainer.on_ray.controller.worker_logs import rank_of
from trainyard_trainer.parallel.activity import WAITING, Activity
from trainyard_trainer.run_files.driver_output import worker_hangs

LOOK_S = 5.0
"""Seconds between two questions to a worker."""

TOLD_S = 30.0
"""Seconds after which the log says that a worker hangs."""

BUSY = {"data": "loading a batch", "compute": "computing"}
"""The phases in which a worker moves on by itself, in words."""

FRAMES = 8
"""How many frames of its stack are shown."""


class WorkerHung(Exception):
    """An error: a worker hung, and its process was ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What a worker is doing."""

    phase: str
    seconds: float
    """The time that it has been in this phase."""
    stack: str = ""
    """Where in the code it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """What is known of a worker that hangs."""

    seconds: float
    words: str
    stack: str = ""


def hangs(
    doing: Mapping[int, Doing], silent_s: Mapping[int, float], limit_s: float
) -> dict[int, Hang]:
    """Return the workers that have hung for `limit_s` seconds, by rank.

    `doing` has the newest answer of each worker, and `silent_s` the seconds for which one has not answered.
    """
    silent = {
        rank: Hang(seconds=seconds, words=f"it has not answered for {seconds:.0f} s")
        for rank, seconds in silent_s.items()
        if seconds >= limit_s
    }
    late = {rank: each for rank, each in doing.items() if each.seconds >= limit_s}
    if all(each.phase != WAITING for each in late.values()):
        return silent
    return silent | {
        rank: Hang(
            seconds=each.seconds,
            words=f"it has been {BUSY[each.phase]} for {each.seconds:.0f} s, and others wait for it",
            stack=each.stack,
        )
        for rank, each in late.items()
        if each.phase in BUSY and rank not in silent
    }


class Watched:
    """A worker that is asked again and again what it is doing."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.doing: Doing | None = None
        """Its newest answer."""
        self.silent_s = 0.0
        """The time that it has not answered the newest question, as long as the controller was running."""
        self.is_told = False
        self._answer = worker.execute_async(what_it_does)

    def look(self, passed_s: float) -> None:
        """Take an answer and ask again, or count `passed_s` more seconds without one."""
        ready, _ = ray.wait([self._answer], timeout=0)
        if not ready:
            self.silent_s += min(passed_s, 2 * LOOK_S)
            return
        self.silent_s = 0.0
        try:
            self.doing = ray.get(self._answer)
        except ray.exceptions.RayActorError:
            self.doing = None  # it is lost, and Ray Train knows that too
            return
        self._answer = self.worker.execute_async(what_it_does)


class EndHangingWorkers(WorkerGroupCallback, ReplicaGroupCallback):
    """A callback of Ray Train's controller that ends the processes of workers that hang."""

    def __init__(self, limit_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        """A worker may hang for `limit_s` seconds."""
        self.ended: dict[int, WorkerHung] = {}
        """The workers of the newest worker group whose processes were ended, by rank."""
        self._limit_s = limit_s
        self._now = now
        self._group: Any = None
        self._watched: dict[int, Watched] = {}
        self._looked = now()

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group, self.ended = worker_group, {}
        self._watched = {}

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._group = None

    def after_replica_group_start(self, replica_group: Any) -> None:
        # The others have waited for the replacement: the watch begins anew.
        self._watched = {}
        for worker in replica_group.get_workers():
            self.ended.pop(rank_of(worker), None)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        passed_s = self._now() - self._looked
        if self._group is None or worker_group_status.errors or passed_s < LOOK_S:
            return
        self._looked = self._now()
        if not self._watched:
            self._watched = {rank_of(each): Watched(each) for each in self._group.get_workers()}
            return
        for each in self._watched.values():
            each.look(passed_s)
        self._tell()
        self._end()

    def _hangs(self, limit_s: float) -> Iterator[tuple[int, Watched, Hang]]:
        """Yield the workers that have hung for so long, and whose processes were not ended yet."""
        doing = {rank: each.doing for rank, each in self._watched.items() if each.doing}
        silent_s = {rank: each.silent_s for rank, each in self._watched.items()}
        for rank, hang in hangs(doing, silent_s, limit_s).items():
            if rank not in self.ended:
                yield rank, self._watched[rank], hang

    def _tell(self) -> None:
        for rank, watched, hang in self._hangs(min(TOLD_S, self._limit_s)):
            if not watched.is_told:
                watched.is_told = True
                line = worker_hangs(rank, watched.worker.metadata.hostname, hang.words)
                print(f"{line}\n{hang.stack}".rstrip(), flush=True)

    def _end(self) -> None:
        for rank, watched, hang in self._hangs(self._limit_s):
            self.ended[rank] = WorkerHung(f"{hang.words}, so its process was ended")
            print(
                f"the process of worker {rank} is ended: faults.hang_timeout_s is {self._limit_s:g}",
                flush=True,
            )
            ray.kill(watched.worker.actor)


# In the workers.

_activity: Activity | None = None
"""What this worker process is doing; None in one that does not tell."""


def tell(activity: Activity) -> None:
    """Let the controller know what this worker process is doing."""
    global _activity
    _activity = activity


def what_it_does() -> Doing:
    """Return what this worker is doing: nothing of interest if it does not tell, or is debugged."""
    if _activity is None or _activity.is_debugged:
        return Doing(phase="startup", seconds=0.0)
    phase, seconds = _activity.now()
    return Doing(phase=phase, seconds=seconds, stack=stack_of(_activity.thread))


def stack_of(thread: int) -> str:
    """Return the innermost frames of a thread, indented; nothing if it has ended."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""
