"""Which nodes a pod may use, by their labels and names: its node selector and its required node affinity."""

from __future__ import annotations

from collections.abc import Mapping

from trainyard.errors import ConfigError
from trainyard.quantities import Object

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def node_terms(pod_spec: Object) -> list[Object]:
    """Return node selector terms, one of which a node must match: node selector and required affinity.

    For a pod that may use any node this is one term without expressions.
    """
    selector = pod_spec.get("nodeSelector") or {}
    selected = [
        {"key": key, "operator": "In", "values": [value]} for key, value in selector.items()
    ]
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = []
    for term in (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]:
        both = {**term, "matchExpressions": [*selected, *(term.get("matchExpressions") or [])]}
        terms.append({key: value for key, value in both.items() if value})
    return terms


def selects(pod_spec: Object, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether node selector and required affinity of a pod allow a node with this name and labels."""
    return any(
        all(_matches(one, labels) for one in term.get("matchExpressions") or ())
        and all(_matches(one, {"metadata.name": name}) for one in term.get("matchFields") or ())
        for term in node_terms(pod_spec)
    )


def shown_terms(pod_spec: Object) -> str:
    """Return the labels that a pod selects as text: `gpu=a100, spot=true or gpu=a100`; empty for any node."""
    return " or ".join(
        text
        for term in node_terms(pod_spec)
        if (text := ", ".join(_shown(one) for one in term.get("matchExpressions") or ()))
    )


def _matches(requirement: Object, labels: Mapping[str, str]) -> bool:
    """Return whether labels meet one requirement of a node selector term, as the scheduler decides it."""
    key, values = requirement["key"], requirement.get("values") or []
    value = labels.get(key)
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not value.lstrip("-").isdecimal():
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
        case other:
            raise ConfigError(
                f"node affinity has the operator {other!r}, which Kubernetes does not have"
            )


def _shown(requirement: Object) -> str:
    """Return one requirement as text: `gpu=a100`, `capacity not spot`, `zone in (a, b)`, `cores Gt 8`."""
    key, operator = requirement["key"], requirement["operator"]
    values = requirement.get("values") or []
    match operator, values:
        case "In", [value]:
            return f"{key}={value}"
        case "NotIn", [value]:
            return f"{key} not {value}"
        case "In" | "NotIn", _:
            return f"{key} {'in' if operator == 'In' else 'not in'} ({', '.join(values)})"
        case _:
            return " ".join((key, operator, *values))
