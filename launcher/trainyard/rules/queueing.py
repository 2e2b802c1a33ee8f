"""Rules of the queue systems Kueue, Volcano, YuniKorn and KAI: what they refuse, or never start."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.labels import APPLICATION_LABEL, ELASTIC_ANNOTATION, GANG_LABEL, QUEUE_LABELS
from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

KUEUE_GROUPS_LIMIT = 17
KUEUE_GROUPS_SINCE = ((9, "0.19"), (7, "0.18"))
"""The worker groups that Kueue takes of a RayJob before a version; from 0.19 on it takes 17."""
TIER_LABEL = "volcano.sh/network-topology-highest-tier-allowed"


def suits_kueue(subject: Subject) -> Iterator[Violation]:
    queue = subject.metadata.at("labels", QUEUE_LABELS["kueue"])
    if not subject.is_job or not queue.text:
        return
    shutdown = subject.job.at("shutdownAfterJobFinishes")
    if not shutdown.is_true:
        yield shutdown.breaks(
            "kueue",
            "must be true in a Kueue queue",
            "Set it, and use ttlSecondsAfterFinished instead of deletionRules.",
        )
    if subject.selects_cluster:
        yield subject.job.at("clusterSelector").breaks(
            "kueue", "is not supported in a Kueue queue", "Use rayClusterSpec instead."
        )
    elastic = subject.metadata.at("annotations", ELASTIC_ANNOTATION)
    if subject.autoscales and elastic.text != "true":
        yield subject.cluster.at("enableInTreeAutoscaling").breaks(
            "kueue",
            f"needs the annotation {ELASTIC_ANNOTATION} and Kueue's feature gate "
            "ElasticJobsViaWorkloadSlices",
            "Disable autoscaling, or add the annotation if the feature gate is enabled.",
        )
    yield from _kueue_takes_groups(subject)
    for group in subject.workers:
        if group.place.at("groupName").text == "head":
            yield group.place.at("groupName").breaks(
                "kueue", "is reserved: Kueue uses this name for the head", "Rename the group."
            )


def _kueue_takes_groups(subject: Subject) -> Iterator[Violation]:
    count = len(subject.workers)
    groups = FieldPath(subject.cluster.at("workerGroupSpecs").path, count)
    if count > KUEUE_GROUPS_LIMIT:
        yield groups.breaks(
            "kueue",
            f"is more than Kueue's limit of {KUEUE_GROUPS_LIMIT} groups",
            "Use fewer groups.",
        )
        return
    for limit, version in KUEUE_GROUPS_SINCE:
        if count > limit:
            yield groups.breaks(
                "kueue-version",
                f"needs Kueue {version} or newer: older versions take {limit} groups",
                f"Use at most {limit} groups if the cluster's Kueue is older.",
                "warning",
            )
            return


def suits_volcano(subject: Subject) -> Iterator[Violation]:
    labels = subject.metadata.at("labels")
    if not any(key.startswith("volcano.sh/") for key, _ in labels.entries()):
        return
    if subject.selects_cluster:
        yield subject.job.at("clusterSelector").breaks(
            "volcano", "is not supported in a Volcano queue", "Use rayClusterSpec instead."
        )
    tier = labels.at(TIER_LABEL)
    if tier.is_set and not tier.text.lstrip("-").isdecimal():
        yield tier.breaks("volcano", "must be a whole number", "Write it as a quoted number: '2'.")


def suits_yunikorn(subject: Subject) -> Iterator[Violation]:
    labels = subject.metadata.at("labels")
    if not labels.at(GANG_LABEL).is_set:
        return
    if subject.is_job and not labels.at(APPLICATION_LABEL).text:
        yield labels.at(GANG_LABEL).breaks(
            "gang",
            f"without {APPLICATION_LABEL} only scheduler-plugins reads this label, and the RayJob "
            "stays Initializing",
            f"Add {APPLICATION_LABEL} for YuniKorn, or remove this label.",
            "warning",
        )
    for group in subject.workers:
        least, replicas = group.place.at("minReplicas"), group.place.at("replicas")
        if (least.number or 0) < (replicas.number or 0) and not subject.autoscales:
            yield least.breaks(
                "gang",
                f"the gang has only this number of the {replicas.number} replicas",
                "Set it to the number of replicas.",
                "warning",
            )


def suits_kai(subject: Subject) -> Iterator[Violation]:
    queue = subject.metadata.at("labels", QUEUE_LABELS["kai"])
    if subject.is_job and queue.text and subject.mode == "K8sJobMode":
        yield subject.job.at("submissionMode").breaks(
            "kai", "is not supported in a KAI queue", "Use HTTPMode."
        )


RULES = (suits_kueue, suits_volcano, suits_yunikorn, suits_kai)
