"""The nodes of a cluster: their resources, the pods on them, and which pods they accept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from trainyard.labels import RUN_LABEL
from trainyard.planning.nodes.affinity import selects
from trainyard.quantities import Amounts, Object, amounts_of, difference, requests_of, sum_of

GPU = re.compile(r".*/.*gpu.*|gpu\..*/.*|nvidia\.com/mig-.*")
"""The names of resources that count GPUs or parts of them."""

CONDITION_TAINT = "node.kubernetes.io/"
"""The prefix of the taints by which Kubernetes marks nodes that are cordoned, not ready or under pressure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodHolding:
    """A pod on a node, and the amount of one resource that it has reserved."""

    namespace: str
    pod: str
    run: str | None
    """The run that the pod belongs to, or None."""
    amount: Fraction
    phase: str
    """`Running`, or `Pending` while its images are pulled or its volumes are mounted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node with the pods that run on it."""

    name: str
    labels: dict[str, str]
    taints: tuple[Object, ...]
    is_open: bool
    """Whether the node is ready and not cordoned."""
    allocatable: Amounts
    kept: Amounts
    """Resources reserved by pods that every node runs: those of DaemonSets and of the kubelet."""
    used: Amounts
    """Resources reserved by all pods of the node."""
    pods: tuple[Object, ...]

    def free(self) -> Amounts:
        """Return the resources that no pod on the node has reserved."""
        return difference(self.allocatable, self.used)

    def without_jobs(self) -> Amounts:
        """Return the resources that would be free if only DaemonSets and the kubelet's pods ran."""
        return difference(self.allocatable, self.kept)

    def holders(self, resource: str) -> tuple[PodHolding, ...]:
        """Return the pods that have reserved a resource, the largest amount first."""
        found = [
            PodHolding(
                namespace=pod["metadata"].get("namespace", ""),
                pod=pod["metadata"]["name"],
                run=(pod["metadata"].get("labels") or {}).get(RUN_LABEL),
                amount=amount,
                phase=(pod.get("status") or {}).get("phase") or "Pending",
            )
            for pod in self.pods
            if (amount := requests_of(pod["spec"]).get(resource))
        ]
        return tuple(sorted(found, key=lambda one: (-one.amount, one.namespace, one.pod)))


def nodes_of(nodes: Iterable[Object], pods: Iterable[Object]) -> tuple[Node, ...]:
    """Return the nodes with the pods that run on them, sorted by name. Finished pods do not count."""
    placed: dict[str, list[Object]] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            placed.setdefault(node, []).append(pod)
    found = [_node(node, placed.get(node["metadata"]["name"], [])) for node in nodes]
    return tuple(sorted(found, key=lambda node: node.name))


def _node(node: Object, pods: list[Object]) -> Node:
    status, spec = node.get("status") or {}, node.get("spec") or {}
    ready = {one["type"]: one["status"] for one in status.get("conditions") or []}.get("Ready")
    return Node(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        taints=tuple(spec.get("taints") or ()),
        is_open=ready == "True" and not spec.get("unschedulable"),
        allocatable=amounts_of(status.get("allocatable")),
        kept=_reserved(pod for pod in pods if _runs_on_every_node(pod)),
        used=_reserved(pods),
        pods=tuple(pods),
    )


def _reserved(pods: Iterable[Object]) -> Amounts:
    """Return the resources that pods have reserved together; each pod also takes one of `pods`."""
    total: Amounts = {}
    for pod in pods:
        total = sum_of(total, requests_of(pod["spec"]) | {"pods": Fraction(1)})
    return total


def _runs_on_every_node(pod: Object) -> bool:
    """Return whether a pod belongs to a DaemonSet or to the kubelet (a static pod)."""
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners)


def gpu_resources(nodes: Iterable[Node]) -> list[str]:
    """Return the names of the nodes' resources that count GPUs, or parts of GPUs (MIG)."""
    names = {name for node in nodes for name, amount in node.allocatable.items() if amount}
    return sorted(name for name in names if GPU.fullmatch(name))


def accepts(node: Node, pod_spec: Object) -> bool:
    """Return whether node selector, node affinity, taints and tolerations allow a pod on a node.

    Taints that Kubernetes sets for a while, such as that of a cordoned node, are ignored; see `is_open`.
    """
    tolerations = pod_spec.get("tolerations") or []
    return selects(pod_spec, node.name, node.labels) and all(
        any(tolerates(toleration, taint) for toleration in tolerations)
        for taint in node.taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and not taint["key"].startswith(CONDITION_TAINT)
    )


def tolerates(toleration: Object, taint: Object) -> bool:
    """Return whether a toleration of a pod matches a taint of a node."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same_key: bool = toleration.get("key") == taint["key"]
    return same_key and bool(toleration.get("value", "") == taint.get("value", ""))


def count_fitting_pods(free: Amounts, request: Amounts) -> int:
    """Return how many pods with a resource request fit into an amount of free resources."""
    needed = request | {"pods": Fraction(1)}
    return max(
        0,
        min(
            int(free.get(name, Fraction(0)) // amount) for name, amount in needed.items() if amount
        ),
    )
