"""Nodes that do not exist, with labels, taints and resources that this machine cannot have.

The real scheduler places pods on them, and kwok says that the pods run. Nothing runs in them, so a run there
has its pods and never trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from conftest import (
    Object,
    Team,
    cluster_py,
    delete_runs,
    get,
    kubectl,
    require_test_cluster,
    wait_for,
)

MADE_UP = "trainyard.io/made-up"
TOLERATION: Object = {"key": MADE_UP, "operator": "Exists"}
TAINT: Object = {"key": MADE_UP, "value": "true", "effect": "NoSchedule"}
MADE_UP_HEAD: Object = {
    "head__nodeSelector": {MADE_UP: "true"},
    "head__tolerations": [TOLERATION],
}
"""Changes of the chart's values with which heads use nodes that do not exist."""
RACK = "example.com/rack"
PLACED_S = 60.0


@dataclass(frozen=True, kw_only=True)
class MadeUpNode:
    """What a node has beyond its 96 CPUs, 1 TiB of memory and 8 GPUs."""

    labels: Mapping[str, str]
    taints: Sequence[Object] = ()
    resources: Mapping[str, str] = field(default_factory=dict)


def p5_pool(gpus_per_node: int, **more: Any) -> Object:
    """Return the values of a pool of GPUs, whose nodes do not exist and have the label `machine: p5`."""
    sizes = {"gpusPerNode": gpus_per_node, "cpus": 2 * gpus_per_node, "memoryGib": 64}
    nodes = {"nodeSelector": {"machine": "p5"}, "tolerations": [TOLERATION]}
    return {**sizes, "gpuResource": "nvidia.com/gpu", **nodes, **more}


@contextmanager
def made_up_nodes(*nodes: MadeUpNode) -> Iterator[list[str]]:
    """Add nodes to the cluster, in this order, yield their names, and remove them."""
    require_test_cluster("only it has nodes that do not exist")
    cluster_py("kwok", f"{len(nodes)}")
    try:
        kubectl("wait", "node", f"--selector={MADE_UP}", "--for=condition=Ready", "--timeout=60s")
        names = [f"made-up-{number}" for number in range(len(nodes))]
        for name, node in zip(names, nodes, strict=True):
            change_node(
                name,
                metadata={"labels": node.labels},
                spec={"taints": [TAINT, *node.taints]},
            )
            if node.resources:
                sizes = {"capacity": node.resources, "allocatable": node.resources}
                change_node(name, "--subresource=status", status=sizes)
        yield names
    finally:
        cluster_py("kwok", "0")


def change_node(name: str, *options: str, **changes: Any) -> None:
    """Change fields of a node with a merge patch: null removes a field, and lists are replaced."""
    kubectl("patch", "node", name, "--type=merge", "--patch", json.dumps(changes), *options)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The nodes of the pods of a run."""

    head: str
    workers: list[str]


def pods_of(team: Team, run: str) -> list[Object]:
    """Return the Ray pods of a run."""
    found: list[Object] = get("pods", team.namespace, "-l", f"trainyard.io/run={run}")["items"]
    return found


def placed(team: Team, run: str, workers: int) -> Placed:
    """Wait until the scheduler has found a node for the head and for all workers of a run."""

    def nodes() -> dict[str, list[str]] | None:
        found: dict[str, list[str]] = {"head": [], "worker": []}
        for pod in pods_of(team, run):
            if node := pod["spec"].get("nodeName"):
                found[pod["metadata"]["labels"]["ray.io/node-type"]].append(node)
        return found if len(found["head"]) == 1 and len(found["worker"]) == workers else None

    found = wait_for(
        f"run {run} has a head and {workers} workers on nodes",
        nodes,
        PLACED_S,
        seen=lambda: get("events", team.namespace, "--field-selector=reason=FailedScheduling"),
    )
    return Placed(head=found["head"][0], workers=sorted(found["worker"]))


def free_all_nodes(team: Team) -> None:
    """Delete the runs of a team, and wait until their pods hold nothing of a node."""
    delete_runs(team.namespace)
    wait_for(
        "no pod is left",
        lambda: not get("pods", team.namespace, "-l", "trainyard.io/run")["items"],
        PLACED_S,
    )
