"""RayJobs -> rows: the runs of a namespace as people and programs read them, however many there are."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from trainyard.labels import RUN_LABEL
from trainyard.submission.status import RunStatus, run_status_of, with_pending_reason

Object = dict[str, Any]

PENDING_SHOWN = 500
"""PodLister that wait and are asked why: one page, however many runs there are."""
WIDE = (
    "run", "submission", "phase", "attempts", "nodes", "gpus", "created", "age", "lasted",
    "ray_cluster", "job", "message",
)  # fmt: skip


class PodLister(Protocol):
    """What is needed of a cluster."""

    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        limit: int | None = None,
        cached: bool = False,
    ) -> list[Object]: ...


def run_statuses_of(cluster: PodLister, jobs: list[Object]) -> list[RunStatus]:
    """How many submissions stand, in at most one question more: why those that start do not."""
    statuses = [run_status_of(job) for job in jobs]
    if not any(run_status.phase == "starting" for run_status in statuses):
        return statuses
    pending = cluster.list(
        "Pod", {RUN_LABEL: None}, fields="status.phase=Pending", limit=PENDING_SHOWN, cached=True
    )
    by_cluster: dict[str, list[Object]] = {}
    for pod in pending:
        by_cluster.setdefault(pod["metadata"]["labels"].get("ray.io/cluster", ""), []).append(pod)
    return [
        with_pending_reason(
            run_status, job, by_cluster.get(job.get("status", {}).get("rayClusterName", ""), [])
        )
        for run_status, job in zip(statuses, jobs, strict=True)
    ]


def last_of_each(jobs: list[Object]) -> list[Object]:
    """The newest submission of each run, given oldest first."""
    newest = {
        (job["metadata"].get("namespace", ""), job["metadata"]["labels"][RUN_LABEL]): job
        for job in jobs
    }
    return [newest[key] for key in sorted(newest)]


def describe(job: Object, run_status: RunStatus, now: datetime) -> Object:
    """A submission in plain values: times as text of the API, ages in seconds, numbers as numbers."""
    metadata, status = job["metadata"], job.get("status", {})
    of_cluster = status.get("rayClusterStatus") or {}
    created, ended = metadata["creationTimestamp"], status.get("endTime")
    began = status.get("startTime") or created
    desired = of_cluster.get("desiredWorkerReplicas")
    return {
        "namespace": metadata.get("namespace", ""),
        "run": metadata["labels"][RUN_LABEL],
        "submission": run_status.submission,
        "phase": run_status.phase,
        "attempts": run_status.attempts,
        "nodes": None
        if desired is None
        else f"{of_cluster.get('readyWorkerReplicas', 0)}/{desired}",
        "gpus": of_cluster.get("desiredGPU"),
        "created": created,
        "age": _seconds(created, now),
        "lasted": _seconds(began, _moment(ended) if ended else now),
        "ray_cluster": status.get("rayClusterName"),
        "job": status.get("jobId"),
        "message": run_status.message,
        "progress": run_status.progress,
    }


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _seconds(since: str, until: datetime) -> int:
    return max(int((until - _moment(since)).total_seconds()), 0)
