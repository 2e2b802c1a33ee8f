"""Capacity of a cluster: what its nodes have, what runs on them, and whether a run fits.

The functions are pure: they work on parsed Node and Pod objects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from trainyard.errors import ConfigError
from trainyard.labels import RUN_LABEL
from trainyard.planning.reasons import Reason
from trainyard.quantities import (
    Amounts,
    Object,
    amounts_of,
    difference,
    requests_in,
    requests_of,
    shown_size,
    sum_of,
)

GPU = re.compile(r".*/.*gpu.*|gpu\..*/.*|nvidia\.com/mig-.*")
"""Names of resources that count GPUs or parts of them."""

CONDITION_TAINT = "node.kubernetes.io/"
"""Prefix of the taints with which Kubernetes marks nodes that are cordoned, not ready or under pressure."""

NAMES_SHOWN = 3


# What nodes have.


@dataclass(frozen=True, kw_only=True, slots=True)
class PodHolding:
    """A pod on a node, and the amount of one resource that it has reserved."""

    namespace: str
    pod: str
    run: str | None
    amount: Fraction


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
        kept=_taken(pod for pod in pods if _is_of_the_node(pod)),
        used=_taken(pods),
        pods=tuple(pods),
    )


def _taken(pods: Iterable[Object]) -> Amounts:
    total: Amounts = {}
    for pod in pods:
        total = sum_of(total, requests_of(pod["spec"]) | {"pods": Fraction(1)})
    return total


def _is_of_the_node(pod: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners)


def gpu_resources(nodes: Iterable[Node]) -> list[str]:
    """Return the names of the nodes' resources that count GPUs, or parts of GPUs (MIG)."""
    names = {name for node in nodes for name, amount in node.allocatable.items() if amount}
    return sorted(name for name in names if GPU.fullmatch(name))


# Where a pod may go.


def may_hold(node: Node, pod_spec: Object) -> bool:
    """Whether node selector, taints and tolerations allow a pod on a node that is ready."""
    selector = pod_spec.get("nodeSelector") or {}
    tolerations = pod_spec.get("tolerations") or []
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return False
    return all(
        any(tolerates(toleration, taint) for toleration in tolerations)
        for taint in node.taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and not taint["key"].startswith(CONDITION_TAINT)
    )


def tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same_key: bool = toleration.get("key") == taint["key"]
    return same_key and bool(toleration.get("value", "") == taint.get("value", ""))


def places(room: Amounts, request: Amounts) -> int:
    """Return how many pods with a resource request fit into an amount of free resources."""
    wanted = request | {"pods": Fraction(1)}
    return max(
        0,
        min(
            int(room.get(name, Fraction(0)) // amount) for name, amount in wanted.items() if amount
        ),
    )


# Whether a run fits.


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A group of equal pods of a run: its size and the resources of one pod."""

    name: str
    pod_spec: Object
    request: Amounts
    fewest: int
    most: int


def needs_of(job: Object) -> tuple[Need, ...]:
    """Return the groups of equal pods of a rendered RayJob: worker groups first, then the head."""
    spec = job["spec"]["rayClusterSpec"]
    groups = [
        _need(group["groupName"], group, group["minReplicas"], group["maxReplicas"])
        for group in spec["workerGroupSpecs"]
    ]
    head = _need("head", spec["headGroupSpec"], 1, 1)
    if spec.get("enableInTreeAutoscaling"):
        beside = requests_in(spec.get("autoscalerOptions") or {})
        head = Need(
            name="head",
            pod_spec=head.pod_spec,
            request=sum_of(head.request, beside),
            fewest=1,
            most=1,
        )
    return (*groups, head)


def _need(name: str, group: Object, fewest: int, most: int) -> Need:
    pod_spec = group["template"]["spec"]
    return Need(
        name=name, pod_spec=pod_spec, request=requests_of(pod_spec), fewest=fewest, most=most
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The capacity of the nodes for one group of equal pods."""

    need: Need
    matching: int
    """Number of nodes that node selector, taints and tolerations allow."""
    closed: int
    """Number of matching nodes that are cordoned or not ready."""
    possible: int
    """Number of pods that would fit if nothing else ran."""
    free: int
    """Number of pods that fit now, beside the run's other pods; at most the group's largest size."""
    short: tuple[str, ...]
    """Names of the resources that nodes lack now, on which a pod would fit if nothing else ran."""
    misfits: tuple[str, ...]
    """Descriptions of nodes that are too small for one pod."""

    @property
    def is_enough(self) -> bool:
        """Whether the group's smallest size would fit if nothing else ran."""
        return self.possible >= self.need.fewest


def rooms_for(job: Object, nodes: Sequence[Node]) -> tuple[Room, ...]:
    """Return the capacity for each group of equal pods of a rendered RayJob."""
    left = {node.name: node.free() for node in nodes if node.is_open}
    rooms = []
    for need in needs_of(job):
        matching = [node for node in nodes if may_hold(node, need.pod_spec)]
        free, short = 0, set()
        for node in matching:
            if node.name not in left:
                continue
            fitting = min(places(left[node.name], need.request), need.most - free)
            if not fitting and places(node.without_jobs(), need.request):
                short |= {
                    name
                    for name, amount in need.request.items()
                    if left[node.name].get(name, Fraction(0)) < amount
                }
            taken = {name: amount * fitting for name, amount in need.request.items()}
            left[node.name] = difference(left[node.name], taken | {"pods": Fraction(fitting)})
            free += fitting
        rooms.append(
            Room(
                need=need,
                matching=len(matching),
                closed=sum(not node.is_open for node in matching),
                possible=sum(places(node.without_jobs(), need.request) for node in matching),
                free=free,
                short=tuple(sorted(short)),
                misfits=_misfits(need, matching),
            )
        )
    return tuple(rooms)


def _misfits(need: Need, matching: Sequence[Node]) -> tuple[str, ...]:
    """Describe what nodes lack for one pod. For GPU pods, nodes without any GPU are left out."""
    gpus = [name for name in need.request if GPU.fullmatch(name)]
    lacking: dict[tuple[str, ...], list[str]] = {}
    for node in matching:
        if gpus and not any(node.allocatable.get(name) for name in gpus):
            continue
        own = node.without_jobs()
        missing = tuple(
            f"{name} {shown_size(name, max(own.get(name, Fraction(0)), Fraction(0)))}, "
            f"a pod takes {shown_size(name, amount)}"
            for name, amount in sorted(need.request.items())
            if own.get(name, Fraction(0)) < amount
        )
        if missing:
            lacking.setdefault(missing, []).append(node.name)
    return tuple(
        f"{_names(names)} {'has' if len(names) == 1 else 'have'} {'; '.join(missing)}"
        for missing, names in lacking.items()
    )


def _names(names: Sequence[str]) -> str:
    few = ", ".join(names[:NAMES_SHOWN])
    if len(names) == 1:
        return f"node {few}"
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} nodes ({few}{rest})"


def require_room(rooms: Iterable[Room]) -> None:
    """Raise ConfigError for a run that would not fit even if nothing else ran."""
    for room in rooms:
        if room.is_enough:
            continue
        need = room.need
        sizes = ", ".join(
            f"{name} {shown_size(name, amount)}" for name, amount in sorted(need.request.items())
        )
        raise ConfigError(
            f"the cluster cannot hold the run: {need.name} is {_pods(need.fewest)} with {sizes}; "
            f"{_count_nodes(room.matching)} may hold them, and could hold {room.possible} "
            "if nothing else ran",
            *room.misfits,
            "Ask for less, for another pool, or correct the pool's numbers in the chart's values. "
            "Nodes that the cluster's autoscaler could add are not counted.",
        )


def room_reasons(rooms: Iterable[Room]) -> tuple[Reason, ...]:
    """Return rows for the plan: how many of the run's pods fit now, and what limits them."""
    return tuple(
        Reason(
            name=f"free now: {room.need.name}",
            value=f"{min(room.free, room.need.most)} of {_pods(room.need.most)}",
            why="; ".join(_room_words(room)),
        )
        for room in rooms
    )


def _room_words(room: Room) -> list[str]:
    words = [
        f"{_count_nodes(room.matching)} may hold them, {room.possible} fit if nothing else ran"
    ]
    if room.closed:
        words.append(f"{room.closed} cordoned or not ready")
    if room.free < room.need.fewest:
        short = f", short of {' and '.join(room.short)}" if room.short else ""
        words.append(f"the cluster is busy{short}: the run waits until there is room")
    elif room.free < room.need.most:
        words.append("the run starts, and grows when there is room")
    return [*words, *room.misfits]


def _pods(number: int) -> str:
    return "1 pod" if number == 1 else f"{number} pods"


def _count_nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


# Who holds the GPUs.


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuNode:
    """The GPUs of one resource name on one node."""

    node: str
    pools: tuple[str, ...]
    resource: str
    total: int
    used: int
    is_open: bool
    holders: tuple[PodHolding, ...]

    @property
    def free(self) -> int:
        """Number of free GPUs; 0 on a node that is cordoned or not ready."""
        return max(0, self.total - self.used) if self.is_open else 0


def gpu_nodes(nodes: Sequence[Node], pools: Mapping[str, tuple[str, Object]]) -> list[GpuNode]:
    """Return the GPUs of each node. `pools` maps a pool's name to its GPU resource and pod spec."""
    return [
        GpuNode(
            node=node.name,
            pools=tuple(
                name
                for name, (asked, pod_spec) in pools.items()
                if asked == resource and may_hold(node, pod_spec)
            ),
            resource=resource,
            total=int(node.allocatable[resource]),
            used=int(node.used.get(resource, Fraction(0))),
            is_open=node.is_open,
            holders=node.holders(resource),
        )
        for node in nodes
        for resource in gpu_resources([node])
    ]


def gpus_of_pools(found: Sequence[GpuNode]) -> list[tuple[str, str, Counter[str]]]:
    """Return the number of nodes and of total, used and free GPUs by pool and resource.

    Nodes of no pool are counted under `-`.
    """
    sums: dict[tuple[str, str], Counter[str]] = {}
    for one in found:
        for pool in one.pools or ("-",):
            counts = sums.setdefault((pool, one.resource), Counter())
            counts.update(nodes=1, total=one.total, used=one.used, free=one.free)
    return [(pool, resource, counts) for (pool, resource), counts in sorted(sums.items())]
