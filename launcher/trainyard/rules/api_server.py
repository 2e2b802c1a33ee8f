"""What the API server refuses by KubeRay's CRDs: required fields, choices, ranges, and their CEL rules."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

POLICIES = ("DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone")
MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")

NEW_IN_1_7 = (
    ("networkPolicy",),
    ("tlsOptions",),
    ("historyServerOptions",),
    ("headGroupSpec", "ingressOptions"),
    ("autoscalerOptions", "command"),
    ("autoscalerOptions", "args"),
    ("gcsFaultToleranceOptions", "backend"),
    ("gcsFaultToleranceOptions", "storage"),
)


def has_required_fields(subject: Subject) -> Iterator[Violation]:
    required = [(group.place.at("template"), group.name) for group in subject.groups]
    required += [
        (group.place.at("groupName"), f"worker group {number}")
        for number, group in enumerate(subject.workers)
    ]
    for place, owner in required:
        if not place.is_set:
            yield place.breaks("required", f"is required of {owner}", "Give it.")
    gcs = subject.cluster.at("gcsFaultToleranceOptions")
    if subject.kuberay == "1.6" and gcs.is_set and not gcs.at("redisAddress").is_set:
        yield gcs.at("redisAddress").breaks(
            "required", "is required with gcsFaultToleranceOptions", "Give the address of Redis."
        )


def chooses_what_there_is(subject: Subject) -> Iterator[Violation]:
    cluster = subject.cluster
    choices: list[tuple[FieldPath, tuple[str, ...]]] = [
        (cluster.at("autoscalerOptions", "version"), ("v1", "v2")),
        (
            cluster.at("autoscalerOptions", "upscalingMode"),
            ("Default", "Aggressive", "Conservative"),
        ),
        (cluster.at("authOptions", "mode"), ("disabled", "token")),
        (cluster.at("upgradeStrategy", "type"), ("Recreate", "None")),
    ]
    strategy = subject.job.at("deletionStrategy")
    for rule in strategy.at("deletionRules").items():
        condition = rule.at("condition")
        choices += [
            (rule.at("policy"), POLICIES),
            (condition.at("jobStatus"), ("SUCCEEDED", "FAILED")),
            (condition.at("jobDeploymentStatus"), ("Failed",)),
        ]
    choices += [(strategy.at(when, "policy"), POLICIES) for when in ("onSuccess", "onFailure")]
    if subject.kuberay == "1.7":
        gcs = cluster.at("gcsFaultToleranceOptions")
        choices += [
            (gcs.at("backend"), ("redis", "rocksdb")),
            (gcs.at("storage", "deletionPolicy"), ("DeleteWithCluster", "Retain")),
            (
                cluster.at("networkPolicy", "mode"),
                ("DenyAll", "DenyAllIngress", "DenyAllEgress"),
            ),
            (
                cluster.at("headGroupSpec", "ingressOptions", "pathType"),
                ("Exact", "Prefix", "ImplementationSpecific"),
            ),
        ]
    for place, known in choices:
        if place.is_set and place.value not in known:
            yield place.breaks("choice", "is no choice", f"Use one of {', '.join(known)}.")


def stays_in_range(subject: Subject) -> Iterator[Violation]:
    deadline = subject.job.at("preRunningDeadlineSeconds")
    if deadline.number is not None and deadline.number < 1:
        yield deadline.breaks("range", "must be at least 1", "Raise it, or leave it out.")
    rules = subject.job.at("deletionStrategy", "deletionRules")
    if rules.value == []:
        yield rules.breaks("range", "must not be empty", "Leave out deletionStrategy.")
    for rule in rules.items():
        ttl = rule.at("condition", "ttlSeconds")
        if ttl.number is not None and ttl.number < 0:
            yield ttl.breaks("range", "must be at least 0", "Use 0 for at once.")


def deletes_in_one_way(subject: Subject) -> Iterator[Violation]:
    """The strategy is rules or the older pair, and a rule has one condition."""
    strategy = subject.job.at("deletionStrategy")
    if not strategy.is_set:
        return
    pair = [strategy.at(when) for when in ("onSuccess", "onFailure")]
    rules = strategy.at("deletionRules")
    if rules.is_set and any(one.is_set for one in pair):
        yield strategy.breaks(
            "deletion-form",
            "has deletionRules and onSuccess or onFailure",
            "Keep deletionRules alone: the pair is deprecated.",
        )
    elif not rules.is_set and not all(one.at("policy").is_set for one in pair):
        yield strategy.breaks(
            "deletion-form",
            "has neither deletionRules nor a policy for both onSuccess and onFailure",
            "Write deletionRules, or leave deletionStrategy out.",
        )
    for rule in rules.items():
        condition = rule.at("condition")
        count = sum(condition.at(one).is_set for one in ("jobStatus", "jobDeploymentStatus"))
        if count != 1:
            yield condition.breaks(
                "deletion-condition",
                f"has {count} of jobStatus and jobDeploymentStatus",
                "Give exactly one; write two rules for two conditions.",
            )


def is_managed_by_someone_known(subject: Subject) -> Iterator[Violation]:
    owner = subject.root.at("spec", "managedBy")
    if owner.is_set and owner.value not in MANAGERS:
        yield owner.breaks(
            "managed-by", "is neither KubeRay nor MultiKueue", f"Use {' or '.join(MANAGERS)}."
        )


def has_the_fields_of_its_release(subject: Subject) -> Iterator[Violation]:
    """KubeRay 1.6 drops what came with 1.7, in silence unless the client asks for strict validation."""
    if subject.kuberay != "1.6":
        return
    places = [subject.cluster.at(*keys) for keys in NEW_IN_1_7]
    places += [group.place.at("priority") for group in subject.workers]
    for place in places:
        if place.is_set:
            yield place.breaks(
                "new-in-1.7",
                "came with KubeRay 1.7; a 1.6 API server refuses or drops it",
                "Leave it out, or upgrade the operator and its CRDs.",
            )


RULES = (
    has_required_fields,
    chooses_what_there_is,
    stays_in_range,
    deletes_in_one_way,
    is_managed_by_someone_known,
    has_the_fields_of_its_release,
)
