"""Rules of the operator for the clean-up of a RayJob after its end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

ORDER = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
"""Deletion policies from the innermost object to the outermost: none may take effect before the one in
front of it."""


def has_one_clean_up(subject: Subject) -> Iterator[Violation]:
    shutdown = subject.job.at("shutdownAfterJobFinishes")
    strategy = subject.job.at("deletionStrategy")
    if not shutdown.is_true:
        return
    if strategy.at("deletionRules").value:
        yield shutdown.breaks(
            "clean-up",
            "cannot be combined with deletionStrategy.deletionRules",
            "Keep one of the two; Kueue and suspend need shutdownAfterJobFinishes.",
        )
    for when in ("onSuccess", "onFailure"):
        policy = strategy.at(when, "policy")
        if policy.text == "DeleteNone":
            yield policy.breaks(
                "clean-up",
                "cannot be combined with shutdownAfterJobFinishes: true",
                "Set that to false, or use another policy.",
            )


def deletes_what_it_may(subject: Subject) -> Iterator[Violation]:
    for policy in _policies(subject):
        if subject.selects_cluster and policy.text in ("DeleteCluster", "DeleteWorkers"):
            yield policy.breaks(
                "foreign-cluster",
                "would delete a cluster that does not belong to the RayJob (clusterSelector)",
                "Use DeleteSelf or DeleteNone.",
            )
        if subject.autoscales and policy.text == "DeleteWorkers":
            yield policy.breaks(
                "autoscaled-workers",
                "cannot be combined with enableInTreeAutoscaling",
                "Use DeleteCluster, or disable autoscaling.",
            )


def says_each_thing_once(subject: Subject) -> Iterator[Violation]:
    seen: set[tuple[str, str]] = set()
    for rule in subject.job.at("deletionStrategy", "deletionRules").items():
        pair = (_condition(rule), rule.at("policy").text)
        if pair in seen:
            yield rule.at("policy").breaks(
                "repeated-rule", f"is used twice for {pair[0]}", "Keep one of the two rules."
            )
        seen.add(pair)


def deletes_from_the_inside_out(subject: Subject) -> Iterator[Violation]:
    seconds: dict[str, dict[str, FieldPath]] = {}
    for rule in subject.job.at("deletionStrategy", "deletionRules").items():
        seconds.setdefault(_condition(rule), {})[rule.at("policy").text] = rule.at(
            "condition", "ttlSeconds"
        )
    for condition, by_policy in seconds.items():
        staged = [(policy, by_policy[policy]) for policy in ORDER if policy in by_policy]
        for (before, earlier), (after, later) in pairwise(staged):
            if (later.number or 0) < (earlier.number or 0):
                yield later.breaks(
                    "deletion-order",
                    f"on {condition}, {after} takes effect before {before} at {earlier.number} s",
                    f"Use at least {earlier.number}.",
                )


def _policies(subject: Subject) -> Iterator[FieldPath]:
    strategy = subject.job.at("deletionStrategy")
    for rule in strategy.at("deletionRules").items():
        yield rule.at("policy")
    for when in ("onSuccess", "onFailure"):
        yield strategy.at(when, "policy")


def _condition(rule: FieldPath) -> str:
    condition = rule.at("condition")
    return f"{condition.at('jobStatus').text}{condition.at('jobDeploymentStatus').text}"


RULES = (
    has_one_clean_up,
    deletes_what_it_may,
    says_each_thing_once,
    deletes_from_the_inside_out,
)
