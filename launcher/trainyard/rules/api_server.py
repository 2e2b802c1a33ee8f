"""Rules of the API server: the CEL rules of KubeRay's CRDs, and fields that only some releases have.

`trainyard.rules.crd_schema` checks the OpenAPI schema of the CRDs.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")


def chooses_what_there_is(subject: Subject) -> Iterator[Violation]:
    """Check the enumerations of fields that were added in KubeRay 1.7; the schema has those of older
    fields."""
    if subject.kuberay == "1.6":
        return
    cluster = subject.cluster
    gcs = cluster.at("gcsFaultToleranceOptions")
    choices: list[tuple[FieldPath, tuple[str, ...]]] = [
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
            yield place.breaks("choice", "is not a valid value", f"Use one of {', '.join(known)}.")


def deletes_in_one_way(subject: Subject) -> Iterator[Violation]:
    """Require deletionRules or the deprecated pair onSuccess and onFailure, and one condition for each
    rule."""
    strategy = subject.job.at("deletionStrategy")
    if not strategy.is_set:
        return
    pair = [strategy.at(when) for when in ("onSuccess", "onFailure")]
    rules = strategy.at("deletionRules")
    if rules.is_set and any(one.is_set for one in pair):
        yield strategy.breaks(
            "deletion-form",
            "has both deletionRules and onSuccess or onFailure",
            "Keep only deletionRules: the others are deprecated.",
        )
    elif not rules.is_set and not all(one.at("policy").is_set for one in pair):
        yield strategy.breaks(
            "deletion-form",
            "has neither deletionRules nor a policy for both onSuccess and onFailure",
            "Add deletionRules, or remove deletionStrategy.",
        )
    for rule in rules.items():
        condition = rule.at("condition")
        count = sum(condition.at(one).is_set for one in ("jobStatus", "jobDeploymentStatus"))
        if count != 1:
            yield condition.breaks(
                "deletion-condition",
                f"must have exactly one of jobStatus and jobDeploymentStatus, but has {count}",
                "Set exactly one; use two rules for two conditions.",
            )


def is_managed_by_someone_known(subject: Subject) -> Iterator[Violation]:
    owner = subject.root.at("spec", "managedBy")
    if owner.is_set and owner.value not in MANAGERS:
        yield owner.breaks(
            "managed-by", "is not a known controller", f"Use {' or '.join(MANAGERS)}."
        )


def has_the_fields_of_its_release(subject: Subject) -> Iterator[Violation]:
    """Refuse fields of KubeRay 1.7 for 1.6, which silently drops them unless the client asks for strict
    validation."""
    if subject.kuberay != "1.6":
        return
    for place in subject.places_new_in_1_7:
        if place.is_set:
            yield place.breaks(
                "new-in-1.7",
                "was added in KubeRay 1.7; with the CRDs of 1.6 the API server refuses or drops it",
                "Remove it, or upgrade the operator and its CRDs.",
            )


RULES = (
    chooses_what_there_is,
    deletes_in_one_way,
    is_managed_by_someone_known,
    has_the_fields_of_its_release,
)
