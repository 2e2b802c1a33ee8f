"""Failures of running pods: memory, disk, eviction, preemption, lost nodes."""

from __future__ import annotations

import re

from trainyard.diagnosis.failure import Match, any_of, evidence, failure, last_match
from trainyard.diagnosis.snapshot import (
    INIT_CONTAINER,
    Snapshot,
    event_time,
    is_head,
    is_ready,
    limits,
    name_of,
    terminations,
)
from trainyard.diagnosis.symptoms import ended_evidence, find

ENDED_BY_NODE = "Pod status: Failed; Pod restart policy: Always"
"""Part of KubeRay's message about a failed pod that it replaces; failed containers are restarted instead."""

LATELY_S = 900.0
"""Two failed pods within so many seconds are a pattern, and no single event."""


def _oom(snapshot: Snapshot, *, of_head: bool) -> Match | None:
    for pod in snapshot.pods:
        if is_head(pod) != of_head or (is_ready(pod) and not snapshot.is_broken):
            continue
        for name, ended in terminations(pod):
            if ended.get("reason") == "OOMKilled" and name != INIT_CONTAINER:
                limit = limits(pod, name).get("memory", "its limit")
                return Match(
                    cause=f"container {name} of {name_of(pod)} was killed at its memory limit of {limit}",
                    evidence=(ended_evidence(pod, name, ended),),
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
