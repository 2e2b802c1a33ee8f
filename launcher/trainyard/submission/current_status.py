"""Ask the cluster once how a submission stands: RayJob, pending pods, and the end of the driver's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from trainyard.cluster.follow import WatchAccess
from trainyard.errors import ClusterError
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
from trainyard_trainer.run_files.driver_output import PROGRESS, SUMMARY, last_record

Object = dict[str, Any]

HEAD_CONTAINER = "ray-head"
"""The container of a head pod in which Ray and the driver run."""

LOG_TAIL_LINES = 400
"""How many lines from the end of a driver's log are searched for its last records."""

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
        log = "" if pod is None else _end_of_log(cluster, pod)
        progress, summary = last_record(log, PROGRESS), last_record(log, SUMMARY)
        error = error_lines(log)[0] if has_error(log) else None
        found = replace(run_status, progress=progress, summary=summary)
        return with_cause_of_stop(found, error)
    return run_status


def _end_of_log(cluster: StatusAccess, pod: str) -> str:
    """Return the end of a head's log; empty if its container has not started, or is gone already."""
    try:
        return cluster.log(pod, HEAD_CONTAINER, tail_lines=LOG_TAIL_LINES)
    except ClusterError as error:
        if error.reason in ("BadRequest", "NotFound"):
            return ""
        raise
