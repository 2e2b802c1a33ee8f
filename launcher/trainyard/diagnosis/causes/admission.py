"""Failures before pods exist: the API server does not admit them."""

from __future__ import annotations

import re

from trainyard.diagnosis.failure import Match, evidence, failure
from trainyard.diagnosis.snapshot import Snapshot
from trainyard.diagnosis.symptoms import Symptom, symptoms

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
