"""The rules that KubeRay objects obey: those of the API server, of the operator, and those that nobody
checks until a run fails by them.

Without a webhook, KubeRay checks an object when it is there already, and an invalid RayJob then has
no way out but its deletion. So everything that an object can show before it exists is checked here,
by pure functions over the parsed object. What only status, operator or change can show is
put into words by `explained`.
"""

from __future__ import annotations

from typing import Any

from trainyard.errors import ConfigError
from trainyard.rules import api_server, deletion, practice, queueing, raycluster, rayjob
from trainyard.rules.field_path import FieldPath, Kuberay, Violation
from trainyard.rules.subject import Subject

RULES = (
    *api_server.RULES,
    *rayjob.RULES,
    *deletion.RULES,
    *raycluster.RULES,
    *practice.RULES,
    *queueing.RULES,
)

KINDS = ("RayJob", "RayCluster")


def name_of(document: Any) -> str:
    """`RayJob digits`, or what there is of it."""
    metadata = FieldPath("", document).at("metadata")
    name = metadata.at("name").text or f"{metadata.at('generateName').text}..."
    return f"{document['kind']} {name}"


def check(document: Any, kuberay: Kuberay, ray: str | None = None) -> tuple[Violation, ...]:
    """All findings about a parsed RayJob or RayCluster, in the order of the rules.

    `ray` is the version in the image, where that is known.
    """
    subject = Subject(document, kuberay, ray)
    return tuple(finding for rule in RULES for finding in rule(subject))


def require(document: Any, kuberay: Kuberay, ray: str) -> tuple[Violation, ...]:
    """The warnings about an object that is to be sent. Raises ConfigError with every error."""
    findings = check(document, kuberay, ray)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        count = "1 rule" if len(errors) == 1 else f"{len(errors)} rules"
        raise ConfigError(
            f"{name_of(document)} breaks {count} of KubeRay {kuberay}",
            *map(str, errors),
            "What the run file does not say comes from the platform: `trainyard platform get`.",
        )
    return findings
