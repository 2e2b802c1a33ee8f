"""Failures before pods exist: the API server or a queue does not admit them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.activity import duration
from trainyard.diagnosis.failure import Match, evidence, failure
from trainyard.diagnosis.snapshot import Object, Snapshot
from trainyard.diagnosis.symptoms import Symptom, symptoms
from trainyard.labels import QUEUE_LABELS
from trainyard.submission.queue_wait import (
    FAILED_TO_START,
    exceeds_all_quota,
    is_deactivated,
    is_finished,
    queue_of,
    shortened,
)
from trainyard.submission.status import condition

QUEUE_LABEL = QUEUE_LABELS["kueue"]
QUEUE_KIND = "LocalQueue"

CREATING = re.compile(r"FailedCreate|FailedToCreate")
"""Reasons of KubeRay and of controllers that could not create an object."""


def refused(snapshot: Snapshot, pattern: str) -> tuple[Symptom, re.Match[str]] | None:
    """Return the first failure to create an object whose message matches, with the match."""
    for symptom in symptoms(snapshot):
        match = re.search(pattern, symptom.text)
        if CREATING.search(symptom.reason) and match:
            return symptom, match
    return None


@failure(
    "pod-security",
    seen="RayCluster condition ReplicaFailure, event FailedToCreateHeadPod or "
    "FailedToCreateWorkerPod",
    remedy="Remove the fields that the message names from `pod`, `head.pod` or `pools.NAME.pod` in the "
    "values of the chart, or lower the namespace's label pod-security.kubernetes.io/enforce.",
)
def pod_security(snapshot: Snapshot) -> Match | None:
    """Pod Security does not admit the run's pods to the namespace."""
    found = refused(snapshot, r'violates PodSecurity "([^"]+)"')
    if found is None:
        return None
    symptom, match = found
    return Match(
        cause=f"namespace {snapshot.namespace} enforces Pod Security {match[1]}, and the pods violate it",
        evidence=(symptom.evidence,),
    )


@failure(
    "resource-quota",
    seen="RayCluster condition ReplicaFailure with `exceeded quota`; the ResourceQuota's status",
    remedy="Ask for less (--gpus, --workers), stop another run of the namespace, or raise "
    "ResourceQuota {quota}.",
)
def resource_quota(snapshot: Snapshot) -> Match | None:
    """A ResourceQuota of the namespace is used up."""
    found = refused(snapshot, r"exceeded quota: ([^,]+), (.*)")
    if found is None:
        return None
    symptom, match = found
    name = match[1]
    seen = [symptom.evidence]
    for quota in snapshot.quotas:
        status = quota.get("status", {})
        if quota["metadata"]["name"] == name and status.get("hard"):
            used = status.get("used", {})
            numbers = (
                f"{key} {used.get(key, '0')} of {hard}" for key, hard in status["hard"].items()
            )
            seen.append(evidence(f"ResourceQuota {name}", f"used: {', '.join(numbers)}"))
    return Match(
        cause=f"ResourceQuota {name} does not admit a pod: {match[2]}",
        evidence=tuple(seen),
        values={"quota": name},
    )


@failure(
    "quota-needs-sizes",
    seen="RayCluster condition ReplicaFailure with `must specify`",
    remedy="Set in the platform, for each container, the resources that ResourceQuota {quota} counts, or "
    "add a LimitRange with defaults to the namespace.",
)
def quota_needs_sizes(snapshot: Snapshot) -> Match | None:
    """A ResourceQuota counts a resource that the pods do not request."""
    found = refused(snapshot, r"failed quota: ([^:]+): (must specify .*)")
    if found is None:
        return None
    symptom, match = found
    return Match(
        cause=f"ResourceQuota {match[1]} requires each pod to set a resource that it counts: {match[2]}",
        evidence=(symptom.evidence,),
        values={"quota": match[1]},
    )


@failure(
    "limit-range",
    seen="RayCluster condition ReplicaFailure with `maximum ... usage` or `minimum ... usage`",
    remedy="Change the sizes of the platform's pools and head, or the namespace's LimitRange.",
)
def limit_range(snapshot: Snapshot) -> Match | None:
    """A LimitRange of the namespace does not allow pods of this size."""
    found = refused(snapshot, r"((?:maximum|minimum) \S+ usage per (?:Container|Pod) is [^\]]+)")
    if found is None:
        return None
    symptom, match = found
    return Match(
        cause=f"the namespace's LimitRange does not allow a pod of this size: {match[1]}",
        evidence=(symptom.evidence,),
    )


@failure(
    "service-account-missing",
    seen="RayCluster condition ReplicaFailure with `serviceaccount ... not found`",
    remedy="Create ServiceAccount {account} in namespace {namespace}: `make platform "
    "NAMESPACE={namespace}` does.",
)
def service_account_missing(snapshot: Snapshot) -> Match | None:
    """The ServiceAccount of the run's pods does not exist."""
    found = refused(snapshot, r'serviceaccount "([^"]+)" not found')
    if found is None:
        return None
    symptom, match = found
    return Match(
        cause=f"the pods run as ServiceAccount {match[1]}, which does not exist in namespace "
        f"{snapshot.namespace}",
        evidence=(symptom.evidence,),
        values={"account": match[1]},
    )


@failure(
    "priority-class-missing",
    seen="RayCluster condition ReplicaFailure with `no PriorityClass`",
    remedy="Create PriorityClass {priority}, or name one that exists.",
)
def priority_class_missing(snapshot: Snapshot) -> Match | None:
    """The PriorityClass of the run's pods does not exist."""
    found = refused(snapshot, r"no PriorityClass with name (\S+) was found")
    if found is None:
        return None
    symptom, match = found
    return Match(
        cause=f"the cluster has no PriorityClass {match[1]}, which the pods name",
        evidence=(symptom.evidence,),
        values={"priority": match[1]},
    )


@failure(
    "webhook-refused",
    seen="RayCluster condition ReplicaFailure or an event with `admission webhook ... denied`",
    remedy="Change the run to meet the policy that the message names, or ask its owner for an exception.",
)
def webhook_refused(snapshot: Snapshot) -> Match | None:
    """A policy of the cluster (an admission webhook) refuses the run's objects."""
    found = refused(snapshot, r'admission webhook "([^"]+)" denied the request: ?(.*)')
    if found is None:
        return None
    symptom, match = found
    return Match(
        cause=f"the cluster's policy {match[1]} refuses a pod: {match[2]}",
        evidence=(symptom.evidence,),
    )


@failure(
    "pods-refused",
    seen="RayCluster condition ReplicaFailure",
    remedy="Correct what the message names; the operator tries again by itself.",
)
def pods_refused(snapshot: Snapshot) -> Match | None:
    """The API server refuses the run's pods, for another reason."""
    found = refused(snapshot, r".")
    if found is None:
        return None
    return Match(
        cause="the API server does not let the operator create the run's pods",
        evidence=(found[0].evidence,),
    )


def _queue(snapshot: Snapshot) -> str:
    """Return the Kueue queue of the RayJob; empty if it has none."""
    return "" if snapshot.job is None else queue_of(snapshot.job)


def _queue_conditions(snapshot: Snapshot) -> Iterator[tuple[str, Object]]:
    for thing in (snapshot.local_queue, snapshot.workload):
        if thing is not None:
            name = f"{thing.get('kind', 'Kueue object')} {thing['metadata']['name']}"
            for found in thing.get("status", {}).get("conditions") or []:
                yield name, found


@failure(
    "kueue-inactive",
    seen="a LocalQueue that is missing or not Active, a Workload `Inadmissible`",
    remedy="Name a queue that exists (`kubectl get localqueues -n {namespace}`), or repair or resume its "
    "ClusterQueue (`kubectl describe clusterqueue`).",
)
def kueue_inactive(snapshot: Snapshot) -> Match | None:
    """The Kueue queue of the run does not exist, or is stopped."""
    queue = _queue(snapshot)
    if not queue or not snapshot.spec.get("suspend"):
        return None
    for name, found in _queue_conditions(snapshot):
        is_inactive = found["type"] == "Active" and found["status"] == "False"
        is_inadmissible = found.get("reason") == "Inadmissible"
        if is_inactive or is_inadmissible:
            return Match(
                cause=f"Kueue queue {queue} admits nothing: {found.get('message', '')}",
                evidence=(
                    evidence(name, f"{found['type']} {found['status']}: {found.get('reason')}"),
                ),
            )
    is_asked = QUEUE_KIND not in snapshot.missing_kinds and not any(
        line.startswith(QUEUE_KIND) for line in snapshot.unread
    )
    if snapshot.local_queue is None and snapshot.workload is None:
        if not is_asked:
            what = "Kueue is not installed" if QUEUE_KIND in snapshot.missing_kinds else ""
        else:
            what = f"namespace {snapshot.namespace} has no LocalQueue {queue}"
        if what:
            return Match(
                cause=f"the run waits in Kueue queue {queue}, and {what}",
                evidence=(
                    evidence(f"RayJob {snapshot.submission}", f"label {QUEUE_LABEL}: {queue}"),
                ),
            )
    return None


def _waiting(snapshot: Snapshot) -> Object | None:
    """Return the Workload of a run that waits for quota, else None."""
    workload = snapshot.workload
    if not _queue(snapshot) or not snapshot.spec.get("suspend") or workload is None:
        return None
    is_reserved = condition(workload, "QuotaReserved").get("status") == "True"
    is_evicted = condition(workload, "Evicted").get("status") == "True"
    is_over = is_finished(workload) or is_deactivated(workload) or (is_reserved and not is_evicted)
    return None if is_over else workload


@failure(
    "kueue-failed-to-start",
    seen="a suspended RayJob whose Workload is `Finished FailedToStart`",
    remedy="Kueue does not try again. `trainyard stop {run} -n {namespace}` and submit the run again: it "
    "starts from its last checkpoint. Kueue 0.17 does this to an elastic run that has grown and was then "
    "suspended or preempted (kueue#12994): upgrade it.",
)
def kueue_failed_to_start(snapshot: Snapshot) -> Match | None:
    """Kueue has admitted the run and could not start it."""
    workload = snapshot.workload
    if not _queue(snapshot) or workload is None:
        return None
    finished = condition(workload, "Finished")
    if finished.get("reason") != FAILED_TO_START:
        return None
    return Match(
        cause=f"Kueue has admitted the run and could not start it: {finished.get('message', '')}",
        evidence=(
            evidence(f"Workload {workload['metadata']['name']}", f"Finished: {FAILED_TO_START}"),
        ),
    )


@failure(
    "kueue-too-large",
    seen="a Workload without quota, whose message names a `maximum capacity` that it exceeds",
    remedy="Ask for less (--gpus, --workers), name a pool or queue with more quota, or raise the "
    "ClusterQueue's quota: waiting does not help.",
)
def kueue_too_large(snapshot: Snapshot) -> Match | None:
    """The run is larger than all of the quota that its Kueue queue can ever have."""
    workload = _waiting(snapshot)
    if workload is None:
        return None
    reserved = condition(workload, "QuotaReserved")
    message = str(reserved.get("message") or "")
    if not exceeds_all_quota(message):
        return None
    return Match(
        cause=f"the run is larger than all quota of Kueue queue {_queue(snapshot)}: {shortened(message)}",
        evidence=(
            evidence(
                f"Workload {workload['metadata']['name']}",
                f"QuotaReserved {reserved.get('status', 'unset')}: {reserved.get('reason', '')}",
            ),
        ),
    )


@failure(
    "kueue-waiting",
    seen="a suspended RayJob whose Workload has no quota reserved",
    remedy="Wait, ask for less (--gpus), give the run a higher queue.priority, or raise the "
    "ClusterQueue's quota. `kubectl get workloads -n {namespace}` shows which workloads are "
    "before it.",
)
def kueue_waiting(snapshot: Snapshot) -> Match | None:
    """The run waits in its Kueue queue for quota."""
    workload = _waiting(snapshot)
    if workload is None:
        return None
    name = f"Workload {workload['metadata']['name']}"
    reserved, evicted = condition(workload, "QuotaReserved"), condition(workload, "Evicted")
    place = (
        "" if snapshot.queue_position is None else f", at position {snapshot.queue_position + 1}"
    )
    spent = duration(snapshot.seconds_since(workload["metadata"].get("creationTimestamp")))
    why = shortened(reserved.get("message") or "no quota reserved yet")
    state = f"QuotaReserved {reserved.get('status', 'unset')}: {reserved.get('reason', '')}"
    seen = [evidence(name, state)]
    what = "waits"
    if evicted.get("status") == "True" and evicted.get("reason") != "Deactivated":
        whom = f" for run {snapshot.preemptor}" if snapshot.preemptor else ""
        what = f"was put back ({evicted.get('reason', '')}{whom}) and waits"
        seen.append(evidence(name, f"Evicted: {shortened(evicted.get('message') or '')}"))
    return Match(
        cause=f"the run {what} in Kueue queue {_queue(snapshot)} for {spent}{place}: {why}",
        evidence=tuple(seen),
    )


@failure(
    "suspended",
    seen="RayJob spec.suspend: true without a Kueue queue, or a Workload with spec.active: false",
    remedy="Resume it with `trainyard resume {run} -n {namespace}`; it starts from its last "
    "checkpoint.",
)
def suspended(snapshot: Snapshot) -> Match | None:
    """The RayJob of the run is suspended."""
    is_suspended = snapshot.spec.get("suspend") or snapshot.phase == "suspended"
    if not is_suspended or snapshot.is_over:
        return None
    if _queue(snapshot):
        workload = snapshot.workload
        if workload is None or not is_deactivated(workload):
            return None
        return Match(
            cause=f"the run is suspended: Kueue queue {_queue(snapshot)} passes it over until it is resumed",
            evidence=(evidence(f"Workload {workload['metadata']['name']}", "spec.active: false"),),
        )
    return Match(
        cause="the run is suspended: it has no pods and waits to be resumed",
        evidence=(evidence(f"RayJob {snapshot.submission}", "spec.suspend: true"),),
    )
