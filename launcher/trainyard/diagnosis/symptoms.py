"""List the problems that the objects of a run report in states, conditions and events."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trainyard.diagnosis.failure import Evidence, evidence
from trainyard.diagnosis.snapshot import (
    Object,
    Snapshot,
    containers,
    event_time,
    is_ready,
    name_of,
)
from trainyard.submission.status import condition

DEATHS = (
    "Evicted",
    "Preempted",
    "Preempting",
    "TaintManagerEviction",
    "NodeNotReady",
    "OOMKilling",
)
"""Reasons of events about the end of a pod; all other reasons are about its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """A problem that an object or an event reports."""

    source: str
    reason: str
    text: str
    pod: Object | None = None
    """The pod with the problem, if it exists."""
    container: str = ""

    @property
    def evidence(self) -> Evidence:
        return evidence(self.source, f"{self.reason}: {self.text}" if self.reason else self.text)


def symptoms(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield the present problems; if no object is left, the last ones.

    Events about a pod that is ready by now are left out, and so are failures to create an object that
    exists by now. Events of deleted pods count for an attempt whose driver never started. They also count
    if several pods ended for the same reason while another is being created, since KubeRay deletes an
    evicted pod at once.
    """
    unready = [pod for pod in snapshot.pods if not is_ready(pod)]
    for pod in unready:
        yield from _of_pod(pod)
    for ray_cluster in snapshot.ray_clusters:
        failed = condition(ray_cluster, "ReplicaFailure")
        if failed.get("status") == "True":
            yield Symptom(
                source=f"RayCluster {name_of(ray_cluster)}",
                reason=failed.get("reason", ""),
                text=failed.get("message", ""),
            )
    there = {name_of(pod) for pod in snapshot.pods}
    waiting = {name_of(pod): pod for pod in unready}
    ends = Counter(
        event.get("reason", "")
        for event in snapshot.events
        if (about := event.get("involvedObject", {})).get("kind") == "Pod"
        and about.get("name") not in there
        and event.get("reason") in DEATHS
    )
    for event in reversed(snapshot.events):
        about = event.get("involvedObject", {})
        kind, name, reason = about.get("kind", ""), about.get("name", ""), event.get("reason", "")
        is_gone_pod = kind == "Pod" and name not in there
        if kind == "Pod" and name in there and name not in waiting:
            continue
        if _is_made_since(snapshot, event):
            continue
        if is_gone_pod and not (
            ends[reason] > 1 if unready else snapshot.never_ran or snapshot.is_broken
        ):
            continue
        if not snapshot.never_ran and reason not in DEATHS and name not in waiting:
            continue
        yield Symptom(
            source=f"event of {kind} {name} at {event_time(event)}",
            reason=reason,
            text=event.get("message", ""),
            pod=waiting.get(name),
        )


def find(snapshot: Snapshot, pattern: str, reasons: tuple[str, ...] = ()) -> Symptom | None:
    """Return the first symptom whose text matches and that has one of these reasons, if any are given."""
    for symptom in symptoms(snapshot):
        if (not reasons or symptom.reason in reasons) and re.search(pattern, symptom.text):
            return symptom
    return None


def ended_evidence(pod: Object, container: str, ended: Object) -> Evidence:
    """Return the evidence that a container has ended: reason, exit code and time."""
    return evidence(
        f"pod {name_of(pod)}, container {container}",
        f"{ended.get('reason', 'ended')} with exit code {ended.get('exitCode')} at {ended.get('finishedAt')}",
    )


def _is_made_since(snapshot: Snapshot, event: Object) -> bool:
    """Return whether an event reports a failure to create an object that exists by now.

    The condition ReplicaFailure tells which pods KubeRay cannot create now. KubeRay may create a RayCluster
    twice, because its cache is behind; the second request fails with "already exists".
    """
    about, reason = event.get("involvedObject", {}), event.get("reason", "")
    if reason == "FailedToCreateRayCluster":
        return bool(snapshot.ray_clusters)
    if reason not in ("FailedToCreateHeadPod", "FailedToCreateWorkerPod"):
        return False
    return any(
        name_of(each) == about.get("name")
        and condition(each, "ReplicaFailure").get("status") != "True"
        for each in snapshot.ray_clusters
    )


def _of_pod(pod: Object) -> Iterator[Symptom]:
    name, status = name_of(pod), pod.get("status", {})
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        yield Symptom(
            source=f"pod {name}",
            reason=scheduled.get("reason", ""),
            text=scheduled.get("message", ""),
            pod=pod,
        )
    for container in containers(pod):
        state = container.get("state", {})
        waiting = state.get("waiting", {})
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            yield Symptom(
                source=f"pod {name}, container {container['name']}",
                reason=waiting["reason"],
                text=waiting.get("message", ""),
                pod=pod,
                container=container["name"],
            )
    if status.get("reason"):
        yield Symptom(
            source=f"pod {name}", reason=status["reason"], text=status.get("message", ""), pod=pod
        )
    disrupted = condition(pod, "DisruptionTarget")
    if disrupted.get("status") == "True":
        yield Symptom(
            source=f"pod {name}",
            reason=disrupted.get("reason", ""),
            text=disrupted.get("message", ""),
            pod=pod,
        )
