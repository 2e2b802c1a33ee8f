"""Ray's coordinator of resources as an elastic run needs it: one that sees soon which nodes there are.

A module of its own, because the coordinator is a process of its own, which has no use for torch.
"""

from __future__ import annotations

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    _AutoscalingCoordinatorActor,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAME = "AutoscalingCoordinator"
"""Its name and namespace, by which Ray Train and Ray Data find it, and start one only if there is none."""


class Coordinator(_AutoscalingCoordinatorActor):
    """Counts the nodes each second. Ray's own does every 20 s, and has no setting for it.

    For so long an elastic group would be started where a node was, and the node's end is known.
    """

    TICK_INTERVAL_S = 1


def start_coordinator() -> None:
    """Start it on this node, where Ray would; it stays for as long as the cluster does."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Coordinator)
    actor.options(
        name=NAME,
        namespace=NAME,
        get_if_exists=True,
        lifetime="detached",
        scheduling_strategy=here,
    ).remote()
