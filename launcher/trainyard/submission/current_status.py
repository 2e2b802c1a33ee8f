"""Ask the cluster once how a submission stands: RayJob, pending pods, and the end of the driver's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from trainyard.cluster.follow import WatchAccess
from trainyard.errors import ClusterError
from trainyard.submission.driver_log import SHARED_TAIL_LINES, log_of_driver, tail_lines
from trainyard.submission.place_wait import with_place
from trainyard.submission.queue_wait import with_queue_waits
from trainyard.submission.status import (
    ENDED,
    RunStatus,
    error_lines,
    has_error,
    run_status_of,
    with_cause_of_stop,
    with_pending_reason,
)
from trainyard_trainer.run_files.driver_output import (
    PROGRESS,
    SUMMARY,
    WAITING,
    last_record,
)
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

Object = dict[str, Any]

HEAD_CONTAINER = "ray-head"
"""The container of a head pod in which Ray and the driver run."""

PENDING_PODS_LIMIT = 50
"""How many pending pods of one submission are asked for: the first reason is enough."""


class StatusAccess(WatchAccess, Protocol):
    """The methods of `Cluster` with which the status of a submission is read and watched."""

    @property
    def options(self) -> str: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        limit: int | None = None,
        cached: bool = False,
    ) -> list[Object]: ...
    def log(self, pod: str, container: str, *, tail_lines: int | None = None) -> str: ...


def head_pod(cluster: StatusAccess, ray_cluster: str) -> str | None:
    """Return the name of the running head pod of a RayCluster, or None."""
    labels = {"ray.io/cluster": ray_cluster, "ray.io/node-type": "head"}
    running = [
        pod
        for pod in cluster.list("Pod", labels, fields="status.phase=Running", cached=True)
        if "deletionTimestamp" not in pod["metadata"]
    ]
    return str(running[-1]["metadata"]["name"]) if running else None


def current_status(cluster: StatusAccess, job: Object) -> RunStatus:
    """Return how a submission stands now, with the driver's last records if its head pod is running."""
    (run_status,) = with_queue_waits(cluster, [job], [run_status_of(job)])
    ray_cluster = job.get("status", {}).get("rayClusterName", "")
    if ray_cluster and run_status.phase == "starting":
        pending = cluster.list(
            "Pod",
            {"ray.io/cluster": ray_cluster},
            fields="status.phase=Pending",
            limit=PENDING_PODS_LIMIT,
            cached=True,
        )
        return with_pending_reason(run_status, job, pending)
    if ray_cluster and run_status.phase in ("running", *ENDED):
        pod = head_pod(cluster, ray_cluster)
        log = "" if pod is None else end_of_log(cluster, job, pod)
        progress, summary = last_record(log, PROGRESS), last_record(log, SUMMARY)
        error = error_lines(log)[0] if has_error(log) else None
        found = replace(run_status, progress=progress, summary=summary)
        return with_place(with_cause_of_stop(found, error), last_record(log, WAITING), job)
    return run_status


def with_places(
    cluster: StatusAccess, jobs: Sequence[Object], statuses: Sequence[RunStatus]
) -> list[RunStatus]:
    """Complete the statuses of submissions that wait for their places on a standing RayCluster.

    It costs nothing without such a submission; else two requests for each standing RayCluster. The statuses
    stay as they are where logs may not be read.
    """
    logs: dict[str, str] = {}
    found = []
    for job, run_status in zip(jobs, statuses, strict=True):
        if run_status.phase == "running" and standing_cluster_of(job) is not None:
            ray_cluster = job["status"]["rayClusterName"]
            if ray_cluster not in logs:
                logs[ray_cluster] = _shared_log(cluster, ray_cluster)
            its = log_of_driver(job, logs[ray_cluster])
            run_status = with_place(run_status, last_record(its, WAITING), job)
        found.append(run_status)
    return found


def _shared_log(cluster: StatusAccess, ray_cluster: str) -> str:
    """Return the end of the output of a standing RayCluster's head; empty if it may not be read."""
    try:
        pod = head_pod(cluster, ray_cluster)
        return "" if pod is None else _end_of_output(cluster, pod, SHARED_TAIL_LINES)
    except ClusterError as error:
        if error.reason == "Forbidden":
            return ""
        raise


def end_of_log(cluster: StatusAccess, job: Object, pod: str) -> str:
    """Return the end of the log of a RayJob's driver, from its head pod."""
    return log_of_driver(job, _end_of_output(cluster, pod, tail_lines(job)))


def _end_of_output(cluster: StatusAccess, pod: str, lines: int) -> str:
    """Return the last lines of a head; empty if its container has not started, or is gone already."""
    try:
        return cluster.log(pod, HEAD_CONTAINER, tail_lines=lines)
    except ClusterError as error:
        if error.reason in ("BadRequest", "NotFound"):
            return ""
        raise
