"""Watch a submission: yield its status whenever that changes, until it has ended; cancel its retries once
they are of no use."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from trainyard.cluster.follow import ObjectsByName, follow, follow_log
from trainyard.errors import ClusterError, ClusterUnreachable, RunFailed, TimedOut
from trainyard.labels import RUN_LABEL
from trainyard.submission.current_status import (
    HEAD_CONTAINER,
    StatusAccess,
    current_status,
    head_pod,
)
from trainyard.submission.driver_log import lines_of_driver
from trainyard.submission.place_wait import with_place
from trainyard.submission.queue_wait import QueueWait, is_held, waits_of, with_queue_wait
from trainyard.submission.status import (
    ENDED,
    RunStatus,
    phase_of,
    run_status_of,
    with_pending_reason,
)
from trainyard_trainer.run_files.driver_output import (
    FINAL_FAILURE,
    PROGRESS,
    SUMMARY,
    WAITING,
    record_of,
)
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

Object = dict[str, Any]

LOG_WINDOW_S = 60
"""How many seconds back the log of a running driver is read at first; it prints progress every second."""

QUEUE_POLL_S = 5.0
"""Seconds between two requests for the place of a submission in its queue."""

HEAD_WAIT_S = 2.0
"""Seconds between two requests for the head pod of a driver that should be running."""


class StatusTracker:
    """The status of a submission, from the changes that are passed in. It knows no cluster and no clock."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the RayJob."""
        self.name = name
        self.job: Object | None = None
        """The RayJob as it was last passed in."""
        self._run_status: RunStatus | None = None
        self._pending: list[Object] = []
        self._wait: QueueWait | None = None
        self._place: Object | None = None

    @property
    def ray_cluster(self) -> str:
        """The name of the RayCluster whose driver is running; empty between two attempts.

        On a standing RayCluster the driver starts before KubeRay tells that it runs.
        """
        if self.job is None:
            return ""
        status, phases = self.job.get("status", {}), ["running"]
        if standing_cluster_of(self.job) is not None:
            phases.append("submitting")
        return str(status.get("rayClusterName", "")) if phase_of(status) in phases else ""

    def update_job(self, jobs: ObjectsByName) -> RunStatus:
        """Take a changed RayJob, and return the status. Raises RunFailed if the RayJob is gone."""
        self.job = jobs.get(self.name)
        if self.job is None:
            raise RunFailed(
                f"RayJob {self.name} was deleted while it was watched",
                "Submit the run again: it resumes from its last checkpoint.",
            )
        before, self._run_status = self._run_status, run_status_of(self.job)
        if before is not None and before.phase == "running":
            self._note_driver()
        if not is_held(self.job):
            self._wait = None
        if before is not None and before.phase == self._run_status.phase == "running":
            self._run_status = replace(
                self._run_status,
                progress=before.progress,
                summary=before.summary,
                is_final_failure=before.is_final_failure,
            )
        return self._complete()

    def update_pods(self, pending: ObjectsByName) -> RunStatus | None:
        """Take the run's pods that are pending; return the status, or None before the first RayJob."""
        self._pending = list(pending.values())
        return None if self._run_status is None else self._complete()

    def update_queue(self, wait: QueueWait | None) -> RunStatus | None:
        """Take where the submission stands in its queue; return the status if that changes it, else None."""
        if self.job is None or not is_held(self.job) or wait == self._wait:
            return None
        self._wait = wait
        return self._complete()

    def read_log_line(self, line: str) -> RunStatus | None:
        """Take a line of the driver's log; return the status if the line changes it, else None."""
        progress, summary = record_of(line, PROGRESS), record_of(line, SUMMARY)
        final, place = record_of(line, FINAL_FAILURE), record_of(line, WAITING)
        if self._run_status is None or (progress, summary, final, place) == (None,) * 4:
            return None
        self._place = place or self._place
        self._note_driver()
        self._run_status = replace(
            self._run_status,
            progress=progress or self._run_status.progress,
            summary=summary or self._run_status.summary,
            is_final_failure=final is not None or self._run_status.is_final_failure,
        )
        return self._complete()

    def _note_driver(self) -> None:
        """A driver that prints its records runs, although KubeRay does not know it yet."""
        assert self._run_status is not None
        if self._run_status.phase == "submitting":
            self._run_status = replace(self._run_status, phase="running", ran=True)

    def _complete(self) -> RunStatus:
        assert self._run_status is not None
        assert self.job is not None
        known = with_queue_wait(self._run_status, self._wait)
        known = with_place(known, self._place, self.job)
        return with_pending_reason(known, self.job, self._pending)


def watch_submission(
    cluster: StatusAccess,
    name: str,
    run: str,
    *,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RunStatus]:
    """Yield the status of a submission on each change; the last status is that of its end.

    It reads four sources: a watch on the RayJob `name`, a watch on the pending pods of the run, the queue of
    Kueue while the run is held in one, and the driver's log. Raises RunFailed if the RayJob is deleted,
    TimedOut if the submission has not ended after `timeout_s` seconds, and ClusterUnreachable if the cluster
    does not answer for too long.
    """
    tracker, sources = StatusTracker(name), _MergedSources()
    sources.add(
        "job", follow(cluster, "RayJob", fields=f"metadata.name={name}", clock=clock, sleep=sleep)
    )
    pods = follow(
        cluster, "Pod", {RUN_LABEL: run}, fields="status.phase=Pending", clock=clock, sleep=sleep
    )
    sources.add("pods", pods)
    if timeout_s is not None:
        sources.add("time", _after(timeout_s, sleep))
    logged_cluster, asks_queue = "", False
    for source, item in sources:
        if source == "time":
            raise TimedOut(
                f"run {run} has not ended within {timeout_s:g} s: it goes on as RayJob {name}",
                f"`trainyard watch {run} {cluster.options}` shows its progress, `trainyard stop {run} "
                f"{cluster.options}` stops it.",
            )
        if source == "job":
            run_status: RunStatus | None = tracker.update_job(item)
        elif source == "pods":
            run_status = tracker.update_pods(item)
        elif source == "queue":
            run_status = tracker.update_queue(item)
        else:
            run_status = tracker.read_log_line(item)
        if run_status is None:
            continue
        if run_status.phase in ENDED:
            assert tracker.job is not None
            last = current_status(cluster, tracker.job)
            yield replace(
                last,
                progress=last.progress or run_status.progress,
                summary=last.summary or run_status.summary,
            )
            return
        yield run_status
        if not asks_queue and tracker.job is not None and is_held(tracker.job):
            asks_queue = True
            sources.add("queue", queue_waits(cluster, tracker, sleep))
        if tracker.ray_cluster not in ("", logged_cluster):
            logged_cluster = tracker.ray_cluster
            sources.add("line", driver_lines(cluster, tracker, logged_cluster, clock, sleep))


def _after(seconds: float, sleep: Callable[[float], None]) -> Iterator[None]:
    """Yield once, after so many seconds."""
    sleep(seconds)
    yield


def driver_lines(
    cluster: StatusAccess,
    tracker: StatusTracker,
    ray_cluster: str,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[str]:
    """Yield the lines of the driver's log for as long as its RayCluster is the current one.

    A head pod that is replaced is followed by its successor.
    """
    while tracker.ray_cluster == ray_cluster:
        pod = head_pod(cluster, ray_cluster)
        if pod is not None:
            lines = follow_log(
                cluster, pod, HEAD_CONTAINER, since_s=LOG_WINDOW_S, clock=clock, sleep=sleep
            )
            assert tracker.job is not None
            yield from lines_of_driver(tracker.job, lines)
        sleep(HEAD_WAIT_S)


def queue_waits(
    cluster: StatusAccess,
    tracker: StatusTracker,
    sleep: Callable[[float], None],
) -> Iterator[QueueWait | None]:
    """Yield where the submission stands in its queue, again and again: Kueue's API of positions has no watch.

    A cluster that does not answer is asked again: the watch on the RayJob gives up when it is away for long.
    """
    while True:
        job = tracker.job
        if job is not None and is_held(job):
            with suppress(ClusterUnreachable):
                yield waits_of(cluster, [job]).get(str(job["metadata"].get("uid")))
        sleep(QUEUE_POLL_S)


class _MergedSources:
    """The items of several iterators in the order in which they arrive; each iterator has a thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def add(self, source: str, items: Iterator[Any]) -> None:
        """Read one more iterator in a daemon thread. An error in it is raised by the iteration."""

        def read() -> None:
            try:
                for item in items:
                    self._queue.put((source, item))
            except Exception as error:  # noqa: BLE001 - raised again in the thread that iterates
                self._queue.put(("error", error))

        threading.Thread(target=read, name=f"watch-{source}", daemon=True).start()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield the source and the item of each item, without end. Raises what an iterator has raised."""
        while True:
            source, item = self._queue.get()
            if source == "error":
                raise item
            yield source, item


class PatchAccess(Protocol):
    """The method of `Cluster` with which retries are cancelled."""

    def patch(self, kind: str, name: str, body: Object) -> Object: ...


def cancelling_retries(
    cluster: PatchAccess, submission: str, statuses: Iterable[RunStatus]
) -> Iterator[RunStatus]:
    """Yield the statuses of a submission, and cancel its retries once one of them is of no use.

    That is after an error that a retry cannot cure: `backoffLimit` becomes 0, and KubeRay creates no further
    RayCluster. Without the right to change RayJobs, the next attempts end at once by themselves.
    """
    is_cancelled = False
    for status in statuses:
        if status.is_final_failure and not is_cancelled:
            is_cancelled = True
            try:
                cluster.patch("RayJob", submission, {"spec": {"backoffLimit": 0}})
            except ClusterError as error:
                if error.reason not in ("Forbidden", "NotFound"):
                    raise
        yield status
