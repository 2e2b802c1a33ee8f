"""Gather the objects and logs of a run on a cluster into a `Snapshot`; each kind is requested once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Protocol

from trainyard.diagnosis.causes.kueue import QUEUE_KIND
from trainyard.diagnosis.causes.placement import SCHEDULING
from trainyard.diagnosis.redact import (
    trimmed,
    trimmed_cluster,
    trimmed_event,
    trimmed_node,
    trimmed_pod,
)
from trainyard.diagnosis.snapshot import (
    INIT_CONTAINER,
    Object,
    Snapshot,
    claims_of,
    event_time,
    is_head,
    name_of,
    waits_for_head,
)
from trainyard.diagnosis.symptoms import symptoms
from trainyard.errors import ClusterError, ClusterUnreachable
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard.submission.driver_log import log_of_driver, tail_lines
from trainyard.submission.queue_wait import (
    JOB_UID_LABEL,
    failed_to_start,
    preemptor_of,
    queue_of,
    required_topologies,
    unfinished,
)
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

LOG_LINES = 3000
"""How many lines from the end of the driver's log are read."""
INIT_LOG_LINES = 20
"""How many lines are read of the init container that waits for the head; it writes one each 5 s."""

OPERATOR_LABELS = {"app.kubernetes.io/name": "kuberay-operator"}
OPERATOR_LEASE = "ray-operator-leader"


class LogFolder(Protocol):
    """The methods of `RemoteFolder` that a snapshot needs."""

    def logs(self) -> list[int]: ...
    def read(self, file: str) -> str | None: ...


OpenFolder = Callable[[], AbstractContextManager[LogFolder]]


class ReadableCluster(Protocol):
    """The methods of `Cluster` that a snapshot needs."""

    @property
    def namespace(self) -> str: ...
    @property
    def context(self) -> str | None: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        everywhere: bool = False,
    ) -> list[Object]: ...
    def log(
        self,
        pod: str,
        container: str,
        *,
        tail_lines: int | None = None,
        previous: bool = False,
    ) -> str: ...


class _Queries:
    """Requests to a cluster. Objects that cannot be read are None, and the reason is recorded."""

    def __init__(self, cluster: ReadableCluster) -> None:
        self.cluster = cluster
        self.unread: list[str] = []
        self.refused: set[str] = set()
        self.missing_kinds: list[str] = []

    def list(
        self, kind: str, labels: dict[str, str] | None = None, **how: Any
    ) -> list[Object] | None:
        found: list[Object] | None = self._asked(
            kind, lambda: self.cluster.list(kind, labels, **how)
        )
        return found

    def get(self, kind: str, name: str) -> Object | None:
        found: Object | None = self._asked(f"{kind} {name}", lambda: self.cluster.get(kind, name))
        return found

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except ClusterUnreachable:
            raise
        except ClusterError as error:
            if error.reason == "NoSuchKind":
                self.missing_kinds.append(what.split()[0])
            else:
                self.refused.add(what)
                self.unread.append(f"{what}: {error.reason}")
            return None


def gather(
    cluster: ReadableCluster, run: str, *, now: datetime, open_folder: OpenFolder
) -> Snapshot:
    """Return a snapshot of a run's last submission. Raises ClusterUnreachable."""
    queries = _Queries(cluster)
    jobs = queries.list("RayJob", OWNER_LABELS | {RUN_LABEL: run}) or []
    job = max(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"]), default=None)
    seen: dict[str, Any] = {"run": run, "namespace": cluster.namespace, "now": now}
    seen["context"] = cluster.context
    if job is not None:
        seen |= {"job": trimmed(job)} | _objects_of_submission(queries, run, job)
        snapshot = Snapshot(**seen)
        if not (snapshot.phase == "running" or snapshot.phase == "succeeded"):
            seen |= _related_objects(queries, snapshot)
            seen["init_log"] = _init_log(queries, snapshot)
        seen["log"] = _log(queries, snapshot)
    snapshot = Snapshot(**seen)
    is_silent = (snapshot.is_broken and not snapshot.driver_log) or (
        snapshot.phase == "stopped" and not snapshot.log
    )
    if "RayJob" not in queries.missing_kinds and (job is None or is_silent):
        seen |= _records_of_folder(queries, open_folder)
    return Snapshot(
        **seen, missing_kinds=tuple(queries.missing_kinds), unread=tuple(queries.unread)
    )


def _objects_of_submission(queries: _Queries, run: str, job: Object) -> dict[str, Any]:
    """Return the objects of the submission: its RayCluster, pods, claims and events."""
    prefix = f"{name_of(job)}-"
    ray_cluster = (job.get("status") or {}).get("rayClusterName") or prefix
    shared: set[str] = set()
    if standing := standing_cluster_of(job):
        ray_cluster, found = standing, queries.get("RayCluster", standing)
        clusters = [found] if found else []
        pods = queries.list("Pod", {"ray.io/cluster": standing}) or []
        shared = {name_of(each) for each in (*clusters, *pods)}
    else:
        clusters = queries.list("RayCluster", {RUN_LABEL: run}) or []
        pods = queries.list("Pod", {RUN_LABEL: run}) or []
    claims = {name: queries.get("PersistentVolumeClaim", name) for name in sorted(_claims(job))}
    events = [
        *(queries.list("Event", fields="type=Warning") or []),
        *(queries.list("Event", fields="reason=Preempted") or []),
        *(queries.list("Event", fields="reason=DeletedHeadPod") or []),
        *(queries.list("Event", fields="reason=DeletedWorkerPod") or []),
        *(queries.list("Event", fields="involvedObject.kind=PersistentVolumeClaim") or []),
    ]
    ours = {
        event["metadata"]["uid"]: trimmed_event(event)
        for event in events
        if str(event.get("involvedObject", {}).get("name", "")).startswith(prefix)
        or event.get("involvedObject", {}).get("name") in (name_of(job), *claims, *shared)
    }
    return {
        "ray_clusters": tuple(
            trimmed_cluster(found) for found in clusters if name_of(found).startswith(ray_cluster)
        ),
        "pods": tuple(
            trimmed_pod(pod)
            for pod in sorted(pods, key=name_of)
            if pod["metadata"].get("labels", {}).get("ray.io/cluster", "").startswith(ray_cluster)
        ),
        "claims": {
            name: claim and trimmed(claim)
            for name, claim in claims.items()
            if f"PersistentVolumeClaim {name}" not in queries.refused
        },
        "events": tuple(sorted(ours.values(), key=event_time)),
    }


def _related_objects(queries: _Queries, snapshot: Snapshot) -> dict[str, Any]:
    """Return the objects that a run without progress may be waiting for."""
    said = list(symptoms(snapshot))
    found: dict[str, Any] = {}
    if any("quota" in symptom.text for symptom in said):
        found["quotas"] = tuple(map(trimmed, queries.list("ResourceQuota") or []))
    if any(symptom.reason in SCHEDULING for symptom in said):
        found["nodes"] = _nodes(queries)
    if snapshot.phase == "accepted" or (
        snapshot.job and "deletionTimestamp" in snapshot.job["metadata"]
    ):
        leases = queries.list("Lease", fields=f"metadata.name={OPERATOR_LEASE}", everywhere=True)
        found["leases"] = None if leases is None else tuple(map(trimmed, leases))
    if snapshot.job and "deletionTimestamp" in snapshot.job["metadata"]:
        auth = snapshot.spec.get("rayClusterSpec", {}).get("authOptions") or {}
        secret = auth.get("secretName") or snapshot.status.get("rayClusterName")
        if secret and auth.get("mode") == "token":
            token = queries.get("Secret", secret)
            known = f"Secret {secret}" not in queries.refused
            found["has_token_secret"] = token is not None if known else None
    if snapshot.phase in ("accepted", "starting", "submitting"):
        operators = queries.list("Pod", OPERATOR_LABELS, everywhere=True)
        found["operators"] = None if operators is None else tuple(map(trimmed_pod, operators))
    if snapshot.job and snapshot.spec.get("suspend") and (queue := queue_of(snapshot.job)):
        found |= _queue(queries, queue, snapshot.job)
    return found


def _queue(queries: _Queries, queue: str, job: Object) -> dict[str, Any]:
    listed = queries.list("Workload", {JOB_UID_LABEL: str(job["metadata"].get("uid", ""))}) or []
    workloads = unfinished(listed, job)
    found: dict[str, Any] = {"local_queue": queries.get(QUEUE_KIND, queue)}
    if workloads:
        found["workload"] = trimmed(workloads[-1])
        pending = queries.get("PendingWorkloads", f"{queue}/pendingworkloads") or {}
        for item in pending.get("items", []):
            if item["metadata"]["name"] == name_of(workloads[-1]):
                found["queue_position"] = int(item.get("positionInLocalQueue", 0))
        if uid := preemptor_of(workloads[-1]):
            found["preemptor"] = _run_with_uid(queries, uid)
        if any(required_topologies(workloads[-1])):
            found["nodes"] = _nodes(queries)
    elif failed := failed_to_start(listed, job):
        found["workload"] = trimmed(failed)
    return found


def _nodes(queries: _Queries) -> tuple[Object, ...] | None:
    nodes = queries.list("Node")
    return None if nodes is None else tuple(map(trimmed_node, nodes))


def _run_with_uid(queries: _Queries, uid: str) -> str:
    """Return the name of the run whose RayJob has a UID; empty if the namespace has none."""
    jobs = queries.list("RayJob", OWNER_LABELS) or []
    found = (job["metadata"]["labels"][RUN_LABEL] for job in jobs if job["metadata"]["uid"] == uid)
    return str(next(found, ""))


def _init_log(queries: _Queries, snapshot: Snapshot) -> str:
    """Return the end of the log of one worker's init container that waits for the head."""
    waiting = next((pod for pod in snapshot.pods if waits_for_head(pod)), None)
    if waiting is None:
        return ""
    return _end_of_log(queries, name_of(waiting), INIT_CONTAINER, INIT_LOG_LINES)


def _log(queries: _Queries, snapshot: Snapshot) -> str:
    """Return the end of the newest head's log; for a broken run also of the container before its restart."""
    heads = [
        pod
        for pod in snapshot.pods
        if is_head(pod) and pod.get("status", {}).get("phase", "Pending") != "Pending"
    ]
    if not heads:
        return ""
    head = max(heads, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    said = ""
    for container in head.get("status", {}).get("containerStatuses") or []:
        if (
            container["name"] == HEAD_CONTAINER
            and container.get("restartCount")
            and snapshot.is_broken
        ):
            said = _end_of_log(queries, name_of(head), HEAD_CONTAINER, LOG_LINES, previous=True)
    said += _end_of_log(
        queries, name_of(head), HEAD_CONTAINER, tail_lines(snapshot.job or {}, LOG_LINES)
    )
    return said if snapshot.job is None else log_of_driver(snapshot.job, said)


def _end_of_log(
    queries: _Queries, pod: str, container: str, lines: int, *, previous: bool = False
) -> str:
    """Return the end of a container's log; empty if it has not started, or is gone."""
    try:
        return queries.cluster.log(pod, container, tail_lines=lines, previous=previous)
    except ClusterUnreachable:
        raise
    except ClusterError as error:
        if error.reason not in ("BadRequest", "NotFound"):
            queries.unread.append(f"log of pod {pod}: {error.reason}")
        return ""


def _records_of_folder(queries: _Queries, open_folder: OpenFolder) -> dict[str, Any]:
    """Return the outcome of the run and the log of its last attempt from the run's folder."""
    found: dict[str, Any] = {}
    try:
        with open_folder() as folder:
            if attempts := folder.logs():
                found["log"] = folder.read(names.log_of(attempts[-1])) or ""
            if summary := folder.read(names.SUMMARY):
                found["summary"] = json.loads(summary)
    except ClusterUnreachable:
        raise
    except ClusterError as error:
        queries.unread.append(f"the run's folder: {error.what}")
    return found


def _claims(job: Object) -> set[str]:
    """Return the names of the claims that the pods of a RayJob mount."""
    shape = job["spec"].get("rayClusterSpec") or {}
    groups = [shape.get("headGroupSpec") or {}, *(shape.get("workerGroupSpecs") or [])]
    return {
        claim for group in groups for claim in claims_of(group.get("template", {}).get("spec", {}))
    }
