"""Check a RayJob or RayCluster before it is created.

Without a webhook, KubeRay validates an object only after it was created, and an invalid RayJob can then
only be deleted. Each rule is a pure function over the parsed object. `operator_messages` explains errors
that depend on the status, the operator or a change.
"""

from __future__ import annotations

from typing import Any

from trainyard.errors import ConfigError
from trainyard.rules import (
    api_server,
    crd_schema,
    deletion,
    practice,
    queueing,
    raycluster,
    rayjob,
)
from trainyard.rules.field_path import FieldPath, Kuberay, Violation
from trainyard.rules.pods import pod_fields, pod_security, pod_validation
from trainyard.rules.subject import Subject

RULES = (
    *crd_schema.RULES,
    *api_server.RULES,
    *pod_validation.RULES,
    *pod_fields.RULES,
    *pod_security.RULES,
    *rayjob.RULES,
    *deletion.RULES,
    *raycluster.RULES,
    *practice.RULES,
    *queueing.RULES,
)

KINDS = ("RayJob", "RayCluster")


def name_of(document: Any) -> str:
    """Return the kind and the name of an object, such as `RayJob digits`, also if it has no name yet."""
    metadata = FieldPath("", document).at("metadata")
    name = metadata.at("name").text or f"{metadata.at('generateName').text}..."
    return f"{document['kind']} {name}"


def check(document: Any, kuberay: Kuberay, ray: str | None = None) -> tuple[Violation, ...]:
    """Return all violations of a parsed RayJob or RayCluster, in the order of the rules.

    `ray` is the Ray version of the image, or None if it is not known.
    """
    subject = Subject(document, kuberay, ray)
    return tuple(finding for rule in RULES for finding in rule(subject))


def require(document: Any, kuberay: Kuberay, ray: str) -> tuple[Violation, ...]:
    """Return the warnings about an object that trainyard rendered. Raises ConfigError with all errors.

    Violations of Pod Security are left out: its fields are those of the chart's values, and the notes of
    `helm upgrade` name them once, instead of each submission to a namespace that permits them.
    """
    found = check(document, kuberay, ray)
    findings = tuple(one for one in found if one.rule not in pod_security.NAMES)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        count = "1 rule" if len(errors) == 1 else f"{len(errors)} rules"
        raise ConfigError(
            f"{name_of(document)} violates {count} of KubeRay {kuberay}",
            *map(str, errors),
            "Fields that are not set by the run file come from the platform: `trainyard platform get`.",
        )
    return findings
