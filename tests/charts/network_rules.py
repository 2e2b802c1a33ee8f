"""Whether a NetworkPolicy lets a connection through, by the rules of networking.k8s.io/v1."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any, Literal

Object = dict[str, Any]
NAME_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The other end: a pod with labels in a namespace, or an address outside."""

    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    address: str = ""


def allows(
    policies: list[Object],
    direction: Literal["ingress", "egress"],
    pod: dict[str, str],
    peer: Peer,
    port: int,
    protocol: str = "TCP",
) -> bool:
    """Policies add up: what one of those that select the pod allows is allowed; without one, everything."""
    kind = direction.capitalize()
    chosen = [
        policy
        for policy in policies
        if kind in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], pod)
    ]
    return not chosen or any(
        passes(rule, "from" if direction == "ingress" else "to", policy, peer, port, protocol)
        for policy in chosen
        for rule in policy["spec"].get(direction) or []
    )


def passes(rule: Object, side: str, policy: Object, peer: Peer, port: int, protocol: str) -> bool:
    peers, ports = rule.get(side), rule.get("ports")
    return (not peers or any(is_meant(one, policy, peer) for one in peers)) and (
        not ports or any((one["port"], one["protocol"]) == (port, protocol) for one in ports)
    )


def is_meant(selector: Object, policy: Object, peer: Peer) -> bool:
    if "ipBlock" in selector:
        block = ip_network(selector["ipBlock"]["cidr"])
        return bool(peer.address) and ip_address(peer.address) in block
    if not peer.namespace:
        return False
    if "namespaceSelector" in selector:
        if not matches(selector["namespaceSelector"], {NAME_LABEL: peer.namespace}):
            return False
    elif peer.namespace != policy["metadata"].get("namespace", "team-vision"):
        return False
    return matches(selector.get("podSelector", {}), peer.labels)


def matches(selector: Object, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()
