"""Rules of the queue systems Kueue, Volcano, YuniKorn and KAI: what they refuse, or never start."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.labels import APPLICATION_LABEL, GANG_LABEL, QUEUE_LABELS
from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

KUEUE_GROUPS_LIMIT = 17
ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"
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
    groups = subject.cluster.at("workerGroupSpecs")
    if len(subject.workers) > KUEUE_GROUPS_LIMIT:
        yield FieldPath(groups.path, len(subject.workers)).breaks(
            "kueue",
            f"is more than Kueue's limit of {KUEUE_GROUPS_LIMIT} groups",
            "Use fewer groups.",
        )
    for group in subject.workers:
        if group.place.at("groupName").text == "head":
            yield group.place.at("groupName").breaks(
                "kueue", "is reserved: Kueue uses this name for the head", "Rename the group."
            )


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
