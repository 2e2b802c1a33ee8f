"""Who uses the GPUs of a cluster: counts for each node and for each pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from trainyard.planning.capacity.nodes import Node, PodHolding, accepts, gpu_resources
from trainyard.quantities import Object


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuNode:
    """The GPUs of one resource name on one node."""

    node: str
    pools: tuple[str, ...]
    """The pools whose pods may run on the node."""
    resource: str
    total: int
    used: int
    is_open: bool
    """Whether the node is ready and not cordoned."""
    holders: tuple[PodHolding, ...]
    """The pods that have reserved the GPUs."""

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
                if asked == resource and accepts(node, pod_spec)
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
