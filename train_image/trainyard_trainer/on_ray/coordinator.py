"""Ray's AutoscalingCoordinator with a shorter interval, so that elastic runs notice changes of nodes sooner.

This is a separate module because the actor runs in its own process, which must not import torch.
"""

from __future__ import annotations

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    _AutoscalingCoordinatorActor,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAME = "AutoscalingCoordinator"
"""The actor's name and namespace, by which Ray Train and Ray Data find it."""


class Coordinator(_AutoscalingCoordinatorActor):
    """An AutoscalingCoordinator that reads the cluster's nodes each second.

    Ray's own does so every 20 s, without a setting for it. Until then, Ray Train would try to start workers
    of an elastic run on a node that is known to be lost.
    """

    TICK_INTERVAL_S = 1


def start_coordinator() -> None:
    """Start the coordinator on this node as a detached actor, which lives as long as the cluster."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Coordinator)
    actor.options(
        name=NAME,
        namespace=NAME,
        get_if_exists=True,
        lifetime="detached",
        scheduling_strategy=here,
    ).remote()
