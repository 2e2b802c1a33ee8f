"""Gather the observations of a preflight: from the API server, and from a pod like those of a run."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, Protocol

from trainyard.diagnosis.catalogue import explain_pod
from trainyard.diagnosis.gather import OPERATOR_LABELS
from trainyard.diagnosis.preflight.facts import OPERATOR_S, RIGHTS, ClusterFacts, Probe, Right
from trainyard.diagnosis.redact import trimmed_pod
from trainyard.diagnosis.snapshot import Snapshot, claims_of
from trainyard.errors import ClusterError, ClusterUnreachable
from trainyard.labels import OWNER_LABELS
from trainyard.platform import DataVolume, Platform
from trainyard.submission.run_folder.reader_pod import READER_CONTAINER, storage_pod
from trainyard.submission.run_folder.remote_folder import storage_options
from trainyard_trainer.config.variables import SecretKey
from trainyard_trainer.run_files.driver_output import PROBE, last_record
from trainyard_trainer.run_files.programs.isolation import IN_PODS

Object = dict[str, Any]

PROBE_S = 300.0
"""Timeout in seconds for the probe pod: its image may have to be pulled."""
SETTLE_S = 15.0
"""For how many seconds a failure must last before it is reported: some disappear by themselves."""
POLL_S = 1.0
NAME = "trainyard-preflight"
RAYJOB_CRD = "rayjobs.ray.io"


class ProbedCluster(Protocol):
    """The methods of `Cluster` that a preflight needs."""

    @property
    def namespace(self) -> str: ...
    @property
    def context(self) -> str | None: ...
    def version(self) -> Object: ...
    def can_i(self, verb: str, kind: str, subresource: str = "") -> bool: ...
    def create(self, body: Object, *, dry_run: bool = False) -> Object: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def list(
        self,
        kind: str,
        labels: Any = None,
        *,
        fields: str = "",
        everywhere: bool = False,
        limit: int | None = None,
    ) -> list[Object]: ...
    def delete(self, kind: str, name: str) -> None: ...
    def log(self, pod: str, container: str, *, tail_lines: int | None = None) -> str: ...


def survey(cluster: ProbedCluster) -> ClusterFacts:
    """Return what the API server shows without a run."""
    facts = ClusterFacts(namespace=cluster.namespace)
    try:
        version = cluster.version()
        missing = tuple(kind for kind in ("RayJob", "RayCluster") if not _is_known(cluster, kind))
        return replace(
            facts,
            version=version,
            missing_kinds=missing,
            crd=_asked(lambda: cluster.get("CustomResourceDefinition", RAYJOB_CRD)),
            operators=_all(lambda: cluster.list("Pod", OPERATOR_LABELS, everywhere=True)),
            rights={right: _may(cluster, right) for right in RIGHTS},
            quotas=_all(lambda: cluster.list("ResourceQuota")),
            nodes=_all(lambda: cluster.list("Node")),
            pods=_all(
                lambda: cluster.list(
                    "Pod", fields="status.phase!=Succeeded,status.phase!=Failed", everywhere=True
                )
            ),
        )
    except ClusterUnreachable as error:
        return replace(facts, silence=" ".join([error.what, *error.details[:1]]))


def _is_known(cluster: ProbedCluster, kind: str) -> bool:
    try:
        cluster.list(kind, limit=1)
    except ClusterUnreachable:
        raise
    except ClusterError as error:
        return error.reason != "NoSuchKind"
    return True


def _asked(ask: Callable[[], Any]) -> Any:
    """Return the answer, or None if the cluster refuses it."""
    try:
        return ask()
    except ClusterUnreachable:
        raise
    except ClusterError:
        return None


def _all(ask: Callable[[], list[Object]]) -> tuple[Object, ...] | None:
    found = _asked(ask)
    return None if found is None else tuple(found)


def _may(cluster: ProbedCluster, right: Right) -> bool | None:
    kind, part, verb = right
    allowed: bool | None = _asked(lambda: cluster.can_i(verb, kind, part))
    return allowed


def suspended_job(platform: Platform) -> Object:
    """Build a RayJob that is suspended from the start, so that the operator creates no pods for it."""
    shape = copy.deepcopy(platform.ray_cluster_spec)
    for group in shape["workerGroupSpecs"]:
        group.update(replicas=0, minReplicas=0, maxReplicas=0)
    for group in (shape["headGroupSpec"], *shape["workerGroupSpecs"]):
        group["template"]["spec"]["containers"][0]["image"] = platform.image
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": f"{NAME}-{uuid.uuid4().hex[:8]}", "labels": dict(OWNER_LABELS)},
        "spec": {
            "entrypoint": "true",
            "submissionMode": "HTTPMode",
            "suspend": True,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": shape,
        },
    }


def try_operator(
    cluster: ProbedCluster,
    platform: Platform,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float | None:
    """Seconds until the operator gives a suspended RayJob a status; infinite if it never does.

    None where no RayJob can be made.
    """
    body = suspended_job(platform)
    name = body["metadata"]["name"]
    if _asked(lambda: cluster.create(body)) is None:
        return None
    began = clock()
    try:
        while clock() - began < OPERATOR_S:
            if (cluster.get("RayJob", name) or {}).get("status"):
                return clock() - began
            sleep(POLL_S)
        return float("inf")
    finally:
        cluster.delete("RayJob", name)


def would_refuse(cluster: ProbedCluster, job: Object) -> str:
    """Why the API server would not take a RayJob; empty if it would, or has it already."""
    try:
        cluster.create(job, dry_run=True)
    except ClusterUnreachable:
        raise
    except ClusterError as error:
        return (
            "" if error.reason == "AlreadyExists" else " ".join(error.details[:1] or (error.what,))
        )
    return ""


def claims_of_volumes(
    cluster: ProbedCluster, volumes: Iterable[DataVolume]
) -> dict[str, Object | None]:
    """Return the claims of data volumes by name; None for one that does not exist.

    Without the right to read a claim, nothing is known about it.
    """
    claims: dict[str, Object | None] = {}
    for data in volumes:
        if data.claim is not None:
            with suppress(ClusterError):
                claims[data.claim] = cluster.get("PersistentVolumeClaim", data.claim)
    return claims


def keys_of_secrets(
    cluster: ProbedCluster, secrets: Iterable[SecretKey]
) -> dict[str, frozenset[str] | None]:
    """Return the names of the keys of Secrets, by Secret; None for a Secret that does not exist.

    A Secret that the user may not read is left out. The values are dropped here.
    """
    found: dict[str, frozenset[str] | None] = {}
    for name in sorted({secret.name for secret in secrets}):
        try:
            secret = cluster.get("Secret", name)
        except ClusterError as error:
            if error.reason != "Forbidden":
                raise
            continue
        found[name] = None if secret is None else frozenset(secret.get("data") or {})
    return found


def probe_pod(platform: Platform, image: str) -> Object:
    """Return the platform's reader pod, changed to run the probe program in an image."""
    pod = storage_pod(platform, NAME, OWNER_LABELS, int(PROBE_S))
    pod["spec"]["containers"][0].update(
        image=image,
        command=[*IN_PODS, "trainyard_trainer.tools.pods.probe"],
        args=storage_options(platform.storage),
    )
    return pod


def run_probe(
    cluster: ProbedCluster,
    platform: Platform,
    image: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Probe:
    """Create a pod like those of a run, wait for its result, and delete it."""
    body = probe_pod(platform, image)
    name = body["metadata"]["name"]
    probe = Probe(image=image, storage=platform.storage.path)
    try:
        cluster.create(body)
    except ClusterUnreachable:
        raise
    except ClusterError as error:
        return replace(probe, refused=" ".join(error.details[:1] or (error.what,)))
    try:
        return _follow(cluster, probe, name, clock, sleep)
    finally:
        cluster.delete("Pod", name)


def _follow(
    cluster: ProbedCluster,
    probe: Probe,
    name: str,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Probe:
    began, seen_at = clock(), None
    while True:
        pod = cluster.get("Pod", name)
        snapshot = _snapshot(cluster, name, pod)
        waited_s = clock() - began
        probe = replace(probe, pod=pod, claims=snapshot.claims, waited_s=waited_s)
        phase = (pod or {}).get("status", {}).get("phase")
        if pod is None or phase in ("Succeeded", "Failed"):
            log = "" if pod is None else _asked(lambda: cluster.log(name, READER_CONTAINER)) or ""
            finding = None if log else explain_pod(snapshot)
            return replace(probe, log=log, record=last_record(log, PROBE), finding=finding)
        finding = explain_pod(snapshot)
        seen_at = None if finding is None else seen_at or clock()
        is_lasting = seen_at is not None and clock() - seen_at > SETTLE_S
        if is_lasting or waited_s > PROBE_S:
            return replace(probe, finding=finding)
        sleep(POLL_S)


def _snapshot(cluster: ProbedCluster, name: str, pod: Object | None) -> Snapshot:
    """Return a snapshot of the probe pod, as `explain` uses it for the pods of a run."""
    claims: dict[str, Object | None] = {}
    for claim in claims_of((pod or {}).get("spec", {})):
        with suppress(
            ClusterError
        ):  # without the right to read it, nothing is known about the claim
            claims[claim] = cluster.get("PersistentVolumeClaim", claim)
    named = [f"involvedObject.name={about}" for about in (name, *claims)]
    events = [
        event
        for fields in named
        for event in _asked(partial(cluster.list, "Event", fields=fields)) or []
    ]
    return Snapshot(
        run=name,
        namespace=cluster.namespace,
        context=cluster.context,
        now=datetime.now(timezone.utc),
        job={
            "metadata": {"name": name},
            "spec": {},
            "status": {"jobDeploymentStatus": "Initializing"},
        },
        pods=() if pod is None else (trimmed_pod(pod),),
        claims=claims,
        events=tuple(events),
    )
