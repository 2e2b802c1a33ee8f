"""Failures of containers and pods: missing Secrets, memory, disk, eviction, lost nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.failure import Evidence, Match, any_of, evidence, failure, last_match
from trainyard.diagnosis.snapshot import (
    INIT_CONTAINER,
    Object,
    Snapshot,
    event_time,
    is_head,
    is_ready,
    limits,
    name_of,
    terminations,
    waits_for_head,
)
from trainyard.diagnosis.symptoms import Symptom, find, symptoms

TOKEN_KEY = "auth_token"
"""The key of the Secret with Ray's token."""

ENDED_BY_NODE = "Pod status: Failed; Pod restart policy: Always"
"""Part of KubeRay's message about a failed pod that it replaces; failed containers are restarted instead."""
LATELY_S = 900.0

BROKEN_SECRET = r'secret "?([\w./-]+)"? not found|couldn\'t find key (\S+) in Secret (\S+)'


@failure(
    "token-secret-missing",
    seen="containers that wait with CreateContainerConfigError about key auth_token or the "
    "cluster's own Secret",
    remedy="The operator creates it: check that it runs and may create Secrets in namespace "
    "{namespace}, then stop and submit again. With authOptions.secretName you "
    "create the Secret: add the key auth_token.",
)
def token_secret_missing(snapshot: Snapshot) -> Match | None:
    """The Secret with Ray's token is missing, or has no key auth_token."""
    clusters = {name_of(cluster) for cluster in snapshot.ray_clusters} | {
        str(snapshot.status.get("rayClusterName"))
    }
    auth = snapshot.spec.get("rayClusterSpec", {}).get("authOptions", {})
    for symptom, secret, key in _broken_secrets(snapshot):
        if key == TOKEN_KEY or secret in clusters or secret == auth.get("secretName"):
            return Match(
                cause=f"Secret {secret} with Ray's token {f'has no key {key}' if key else 'is missing'}",
                evidence=(symptom.evidence,),
            )
    return None


@failure(
    "secret-missing",
    seen="containers that wait with CreateContainerConfigError, pods with FailedMount",
    remedy="Create Secret {secret} in namespace {namespace} with the keys that the run file (secrets) or the "
    "chart's values name (pod; storage.s3.secretName: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY).",
)
def secret_missing(snapshot: Snapshot) -> Match | None:
    """A Secret that the pods need is missing, or lacks a key."""
    for symptom, secret, key in _broken_secrets(snapshot):
        what = f"has no key {key}" if key else "does not exist"
        return Match(
            cause=f"the pods need Secret {secret}, which {what}",
            evidence=(symptom.evidence,),
            values={"secret": secret},
        )
    return None


def _broken_secrets(snapshot: Snapshot) -> Iterator[tuple[Symptom, str, str]]:
    """Symptoms about Secrets: the Secret's name, and the key that it lacks."""
    for symptom in symptoms(snapshot):
        if match := re.search(BROKEN_SECRET, symptom.text):
            yield symptom, (match[1] or match[3]).rpartition("/")[2], match[2] or ""


@failure(
    "config-map-missing",
    seen="containers that wait with CreateContainerConfigError, pods with FailedMount",
    remedy="Create ConfigMap {name} in namespace {namespace}, or remove it from the platform's "
    "rayClusterSpec.",
)
def config_map_missing(snapshot: Snapshot) -> Match | None:
    """A ConfigMap that the pods need is missing."""
    symptom = find(snapshot, r'configmap "?([\w.-]+)"? not found')
    if symptom is None:
        return None
    match = re.search(r'configmap "?([\w.-]+)"? not found', symptom.text)
    name = match[1] if match else ""
    return Match(
        cause=f"the pods need ConfigMap {name}, which does not exist",
        evidence=(symptom.evidence,),
        values={"name": name},
    )


@failure(
    "runs-as-root",
    seen="containers that wait with CreateContainerConfigError about runAsNonRoot",
    remedy="Give the image a numeric user that is not 0 (`USER 1000` in its Dockerfile).",
)
def runs_as_root(snapshot: Snapshot) -> Match | None:
    """The image's user is root or has no number, and the pods may not run as root."""
    symptom = find(snapshot, "runAsNonRoot")
    if symptom is None:
        return None
    return Match(
        cause="the image runs as root or as a user without a number, which the pods forbid",
        evidence=(symptom.evidence,),
    )


@failure(
    "no-shell",
    seen="containers that end with StartError, or wait with RunContainerError",
    remedy="Give the image /bin/bash, ray and python on its PATH: build on train_image/Dockerfile.",
)
def no_shell(snapshot: Snapshot) -> Match | None:
    """The image lacks the program that the operator starts: bash, or ray."""
    pattern = r'exec: "?[\w/.-]+"?: (executable file not found|.*no such file)'
    symptom = find(snapshot, pattern)
    if symptom is not None:
        return Match(
            cause="the image lacks a program that its pods start with",
            evidence=(symptom.evidence,),
        )
    for pod in snapshot.pods:
        for name, ended in terminations(pod):
            text = ended.get("message", "")
            if re.search(pattern, text):
                return Match(
                    cause="the image lacks a program that its pods start with",
                    evidence=(evidence(f"pod {name_of(pod)}, container {name}", text),),
                )
    return None


@failure(
    "init-container-oom",
    seen="init container wait-gcs-ready that ended with OOMKilled, or whose log says that its "
    "`ray health-check` was Killed (cgroup v1 kills that alone)",
    remedy="Its limit of 256 MiB is fixed by the operator. Reduce the memory of `ray health-check`: an image "
    "with compiled .pyc files and without imports at start-up (sitecustomize, .pth files) "
    "needs about 190 MB.",
)
def init_container_oom(snapshot: Snapshot) -> Match | None:
    """The operator's init container wait-gcs-ready needs more than its fixed 256 MiB."""
    for pod in snapshot.pods:
        if is_ready(pod):
            continue
        for name, ended in terminations(pod):
            if name == INIT_CONTAINER and ended.get("reason") == "OOMKilled":
                return Match(
                    cause=_too_little(pod),
                    evidence=(_ended(pod, name, ended),),
                )
        killed = last_match(snapshot.init_log.splitlines(), r"\bKilled\b.*health-check")
        if waits_for_head(pod) and killed:
            return Match(
                cause=_too_little(pod),
                evidence=(evidence(f"pod {name_of(pod)}, container {INIT_CONTAINER}", killed[0]),),
            )
    return None


def _too_little(pod: Object) -> str:
    limit = limits(pod, INIT_CONTAINER).get("memory", "256Mi")
    return (
        f"{INIT_CONTAINER} of {name_of(pod)} was killed at its memory limit of {limit}: workers cannot "
        "start"
    )


def _ended(pod: Object, container: str, ended: Object) -> Evidence:
    return evidence(
        f"pod {name_of(pod)}, container {container}",
        f"{ended.get('reason', 'ended')} with exit code {ended.get('exitCode')} at {ended.get('finishedAt')}",
    )


def _oom(snapshot: Snapshot, *, of_head: bool) -> Match | None:
    for pod in snapshot.pods:
        if is_head(pod) != of_head or (is_ready(pod) and not snapshot.is_broken):
            continue
        for name, ended in terminations(pod):
            if ended.get("reason") == "OOMKilled" and name != INIT_CONTAINER:
                limit = limits(pod, name).get("memory", "its limit")
                return Match(
                    cause=f"container {name} of {name_of(pod)} was killed at its memory limit of {limit}",
                    evidence=(_ended(pod, name, ended),),
                    values={"limit": str(limit)},
                )
    return None


def _killed_by_ray(snapshot: Snapshot, *, of_head: bool) -> Match | None:
    """Return a match if Ray's memory monitor killed processes, which it does before the kernel would."""
    if not snapshot.is_broken:
        return None
    killed = last_match(
        reversed(snapshot.driver_log.splitlines()),
        any_of(
            "running low on memory",
            "ray.exceptions.OutOfMemoryError",
            "workers? killed due to memory pressure",
        ),
    )
    if killed is None:
        return None
    address = re.search(r"Memory on the node \(IP: ([^,\s]+)", snapshot.driver_log)
    heads = {pod.get("status", {}).get("podIP") for pod in snapshot.pods if is_head(pod)}
    if of_head != (address is not None and address[1] in heads):
        return None
    victim = "processes of the head, which" if of_head else "a worker, because its pod"
    return Match(
        cause=f"Ray killed {victim} had almost no memory left",
        evidence=(evidence("driver's log", killed[0]),),
        values={"limit": "the present limit"},
    )


@failure(
    "head-oom",
    seen="head container that ended with OOMKilled, or Ray's message that the head is low on memory",
    remedy="Raise head.memoryGib (or head.memoryMibPerWorker) in the platform's values above "
    "{limit}, and submit again.",
)
def head_oom(snapshot: Snapshot) -> Match | None:
    """The Ray head used up its memory."""
    return _oom(snapshot, of_head=True) or _killed_by_ray(snapshot, of_head=True)


@failure(
    "worker-oom",
    seen="worker container that ended with OOMKilled, or Ray's message that a node is low on memory",
    remedy="Raise memoryGib of the pool above {limit}, use a smaller train.micro_batch_size, or "
    "data.loader: ray, which needs less memory.",
)
def worker_oom(snapshot: Snapshot) -> Match | None:
    """A worker pod used up its memory."""
    return _oom(snapshot, of_head=False) or _killed_by_ray(snapshot, of_head=False)


@failure(
    "evicted-disk",
    seen="pods that were Evicted because of ephemeral storage",
    remedy="Give the pool more ephemeralStorageGib, set TMPDIR to a larger disk, or use "
    "data.loader: ray, which makes no local copy of the data.",
)
def evicted_disk(snapshot: Snapshot) -> Match | None:
    """A pod was evicted because it used too much of its node's disk."""
    return _evicted(
        snapshot, any_of("ephemeral", "DiskPressure", "EmptyDir volume", "inodes"), "disk"
    )


@failure(
    "evicted-memory",
    seen="pods that were Evicted because of the node's memory",
    remedy="Leave more of the node's memory to its system (memoryGib of the pool), or keep pods "
    "without limits off these nodes.",
)
def evicted_memory(snapshot: Snapshot) -> Match | None:
    """A pod was evicted because its node ran out of memory."""
    return _evicted(snapshot, any_of("memory"), "memory")


def _evicted(snapshot: Snapshot, pattern: str, what: str) -> Match | None:
    symptom = find(snapshot, pattern, ("Evicted", "TerminationByKubelet"))
    if symptom is None:
        return None
    return Match(
        cause=f"a pod of the run was evicted: its node, or its share of it, ran out of {what}",
        evidence=(symptom.evidence,),
    )


@failure(
    "evicted",
    seen="KubeRay's events about two pods that failed within 15 minutes",
    remedy="Find out what the node ran out of: the kubelet's log, or `kubectl get events -n {namespace} "
    "--field-selector reason=Evicted`, which lacks the events of a pod that had many before. Then raise "
    "ephemeralStorageGib or memoryGib of the pool, or the size of a volume of your own.",
)
def evicted(snapshot: Snapshot) -> Match | None:
    """The node ends pods again and again, and the API server has no record of the reason."""
    ends = [
        event
        for event in snapshot.events
        if ENDED_BY_NODE in event.get("message", "")
        and snapshot.seconds_since(event_time(event)) < LATELY_S
    ]
    if len(ends) < 2:
        return None
    return Match(
        cause=f"{len(ends)} pods of the run were ended by their node, which evicts them or is shut down",
        evidence=tuple(
            evidence(f"event at {event_time(event)}", event["message"].partition("; Ray")[0])
            for event in ends[-2:]
        ),
    )


@failure(
    "preempted",
    seen="pods with DisruptionTarget PreemptionByScheduler, events Preempted",
    remedy="Wait, or give the run a higher priority (queue.priority, priority class of the "
    "platform): it goes on from its last checkpoint.",
)
def preempted(snapshot: Snapshot) -> Match | None:
    """Pods of higher priority preempted pods of the run."""
    symptom = find(snapshot, "", ("PreemptionByScheduler", "Preempted", "Preempting"))
    if symptom is None:
        return None
    return Match(
        cause="a pod of the run was preempted by one of higher priority",
        evidence=(symptom.evidence,),
    )


@failure(
    "node-lost",
    seen="pods with DisruptionTarget DeletionByTaintManager or DeletionByPodGC, reason NodeLost",
    remedy="Wait: the run continues by itself. While the Node object exists that takes "
    "faults.replacement_timeout_s; deleting the Node object makes it faster. If the run has ended, submit it "
    "again: it resumes from its last checkpoint. If nodes are lost often, raise faults.retries and save more "
    "often (checkpoint).",
)
def node_lost(snapshot: Snapshot) -> Match | None:
    """A node of the run was lost, or does not answer any more."""
    reasons = (
        "NodeLost", "DeletionByTaintManager", "DeletionByPodGC", "TaintManagerEviction", "NodeNotReady",
        "NodeShutdown", "Terminated",
    )  # fmt: skip
    symptom = find(snapshot, "", reasons)
    if symptom is None:
        return None
    node = symptom.pod["spec"].get("nodeName", "") if symptom.pod else ""
    return Match(
        cause=f"node {node or 'of a pod'} was lost, or does not answer any more",
        evidence=(symptom.evidence,),
    )


@failure(
    "container-crash",
    seen="containers that end again and again (CrashLoopBackOff), or cannot be started",
    remedy="Read the end of its log: `kubectl logs {pod} -c {container} --previous -n {namespace}`.",
)
def container_crash(snapshot: Snapshot) -> Match | None:
    """A container ends again and again, or cannot be started, for another reason."""
    reasons = (
        "CrashLoopBackOff",
        "RunContainerError",
        "CreateContainerError",
        "CreateContainerConfigError",
        "FailedCreatePodSandBox",
        "StartError",
    )
    symptom = find(snapshot, "", reasons)
    if symptom is None or symptom.pod is None:
        return None
    seen = [symptom.evidence]
    for name, ended in terminations(symptom.pod):
        if name == symptom.container:
            seen.append(_ended(symptom.pod, name, ended))
    return Match(
        cause=f"container {symptom.container} of {name_of(symptom.pod)} keeps ending, or cannot be started",
        evidence=tuple(seen),
        values={"pod": name_of(symptom.pod), "container": symptom.container or "ray-head"},
    )
