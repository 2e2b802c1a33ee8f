"""RayJob status -> Phase, and the loop that waits for the end of a submission."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from launcher.errors import ClusterError, ClusterUnreachable, RunFailed
from launcher.kuberay import RayjobApi

Object = dict[str, Any]

Phase = Literal[
    "accepted",
    "starting",
    "submitting",
    "running",
    "retrying",
    "suspended",
    "succeeded",
    "stopped",
    "failed",
]
ENDED: tuple[Phase, ...] = ("succeeded", "stopped", "failed")
POLL_S = 2.0
LOG_WINDOW_S = 60
"""How far back the log of a running driver is read: its progress comes each second."""
UNREACHABLE_LIMIT_S = 300.0
"""How long a watch outlives an API server that does not answer."""

HEAD_CONTAINER = "ray-head"
PROGRESS = "progress "
SUMMARY = "summary "


class Logs(Protocol):
    """What is needed of a cluster beside its RayJobs."""

    def list(self, kind: str, labels: dict[str, str]) -> list[Object]: ...
    def log(self, pod: str, container: str, since_s: int | None = None) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What is to be seen of a submission at one moment."""

    submission: str
    phase: Phase
    ran: bool = False
    """Whether a driver was started, so that the run's folder may say more."""
    message: str = ""
    progress: Object | None = None
    summary: Object | None = None


def phase_of(status: Object) -> Phase:
    """How a RayJob stands. Only `jobDeploymentStatus` tells an end: KubeRay stores `Failed` when
    no retry is left, while `jobStatus` may read FAILED between two attempts."""
    deployment = status.get("jobDeploymentStatus", "")
    job = status.get("jobStatus", "")
    if deployment == "Complete":
        return "succeeded" if job == "SUCCEEDED" else "stopped"
    if deployment in ("Failed", "ValidationFailed"):
        return "failed"
    if deployment == "Running":
        return "running" if job else "submitting"
    if deployment in ("Suspending", "Suspended"):
        return "suspended"
    if deployment == "Retrying" or (not deployment and status.get("failed", 0)):
        return "retrying"
    return "starting" if deployment in ("Initializing", "Waiting") else "accepted"


def error_lines(log: str) -> list[str]:
    """The driver's last `error: ...` in a log, line by line and stripped; else the log's last line.

    Its details are indented: what Ray says after them is left out.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return [line.strip() for line in lines[-1:]]
    first, *rest = lines[starts[-1] :]
    details = itertools.takewhile(lambda line: line.startswith(" "), rest)
    return [first.strip(), *(line.strip() for line in details)]


def message_of(status: Object) -> str:
    """Why a submission failed: KubeRay's reason and message, of whose quoted log the error alone.

    A message without a reason only repeats the phase.
    """
    if not status.get("reason"):
        return ""
    return f"{status['reason']}: {' '.join(error_lines(status.get('message', '')))}"


def attempts_of(status: Object) -> int:
    """Attempts that were begun: the failed ones, and the one that is under way or ended well."""
    failed = int(status.get("failed", 0))
    return failed + (0 if phase_of(status) in ("failed", "accepted") and failed else 1)


def head_pod(cluster: Logs, ray_cluster: str) -> str | None:
    """Name of the running head pod of a RayCluster, or None."""
    labels = {"ray.io/cluster": ray_cluster, "ray.io/node-type": "head"}
    running = [
        pod
        for pod in cluster.list("Pod", labels)
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return str(running[-1]["metadata"]["name"]) if running else None


def pending_reason(pods: list[Object]) -> str:
    """Why a cluster does not start: what the scheduler or the kubelet says of the first such pod."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{name} is not scheduled: {condition.get('message', '')}"
        for container in [
            *status.get("initContainerStatuses", []),
            *status.get("containerStatuses", []),
        ]:
            waiting = container["state"].get("waiting", {})
            if waiting.get("message"):
                return f"{name} waits: {waiting['reason']}: {waiting['message']}"
    return ""


def record_of(line: str, prefix: str) -> Object | None:
    """The JSON of a line `<prefix>{...}`, or None for any other line and for one cut short."""
    if not line.startswith(prefix):
        return None
    try:
        record = json.loads(line.removeprefix(prefix))
    except ValueError:
        return None  # still being written, or cut at the edge of the window that was read
    return record if isinstance(record, dict) else None


def last_record(log: str, prefix: str) -> Object | None:
    """The last record of its kind in a driver's log, or None."""
    records = (record_of(line, prefix) for line in reversed(log.splitlines()))
    return next((record for record in records if record is not None), None)


def look(cluster: Logs, job: Object) -> Sight:
    """A submission as it stands now, with its driver's latest words where a head is there."""
    status = job.get("status", {})
    phase = phase_of(status)
    ray_cluster = status.get("rayClusterName", "")
    message = message_of(status)
    progress = summary = None
    if ray_cluster and phase == "starting":
        message = message or pending_reason(cluster.list("Pod", {"ray.io/cluster": ray_cluster}))
    if ray_cluster and phase in ("running", *ENDED):
        pod = head_pod(cluster, ray_cluster)
        if pod is not None:
            log = _head_log(cluster, pod, None if phase in ENDED else LOG_WINDOW_S)
            progress, summary = last_record(log, PROGRESS), last_record(log, SUMMARY)
    return Sight(
        submission=job["metadata"]["name"],
        phase=phase,
        ran=bool(status.get("jobStatus")),
        message=message,
        progress=progress,
        summary=summary,
    )


def _head_log(cluster: Logs, pod: str, since_s: int | None) -> str:
    """The head's log; empty where its container is not there, before its start or after its end."""
    try:
        return cluster.log(pod, HEAD_CONTAINER, since_s)
    except ClusterError as error:
        if error.reason in ("BadRequest", "NotFound"):
            return ""
        raise


def watch_run(
    cluster: Logs,
    rayjobs: RayjobApi,
    name: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Sight]:
    """Sights of a submission until it has ended; the last one is its end.

    Raises RunFailed if the RayJob vanishes, ClusterUnreachable if the cluster is silent too long.
    """
    answered_at = clock()
    while True:
        try:
            job = rayjobs.get_job(name)
            sight = None if job is None else look(cluster, job)
            answered_at = clock()
        except ClusterUnreachable:
            if clock() - answered_at > UNREACHABLE_LIMIT_S:
                raise
            sleep(POLL_S)
            continue
        if sight is None:
            raise RunFailed(
                f"RayJob {name} was deleted while it was watched",
                "Submit the run again: it goes on from its last checkpoint.",
            )
        yield sight
        if sight.phase in ENDED:
            return
        sleep(POLL_S)
