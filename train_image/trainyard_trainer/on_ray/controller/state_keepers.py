"""The memory of a node that outlives the workers there: a process with files that have no name on any disk.

Ray Train's controller starts one such process on each node of its workers. It uses no CPU. When the
controller ends, the processes end with it, and the system frees the memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

KEEPER_S = 60.0
"""Seconds within which a keeper must answer; starting its process takes one or two."""


class StateKeeper:
    """A process with files in memory, one for each rank whose state is kept on this node.

    -1 stands for what all workers have alike.
    """

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def paths(self) -> dict[int, str]:
        """Return the paths of the files by rank, which the other processes of the node can open."""
        return {rank: f"/proc/{os.getpid()}/fd/{file}" for rank, file in self._files.items()}

    def make(self, rank: int) -> str:
        """Return the path of a rank's file; an empty one is made if there is none."""
        if rank not in self._files:
            self._files[rank] = os.memfd_create(f"state-{rank}")
        return self.paths()[rank]

    def keep_only(self, ranks: Collection[int]) -> None:
        """Free the memory of all other ranks."""
        for rank in self._files.keys() - set(ranks):
            os.close(self._files.pop(rank))


class KeepersOnNodes(WorkerGroupCallback):
    """A callback of Ray Train's controller that starts a keeper on each node of a worker group."""

    def __init__(self) -> None:
        self._keepers: dict[str, Any] = {}

    def after_worker_group_start(self, worker_group: Any) -> None:
        for node in {worker.metadata.node_id for worker in worker_group.get_workers()}:
            if not self._is_alive(node):
                self._keepers[node] = (
                    ray.remote(StateKeeper)
                    .options(
                        name=name_on(node),
                        num_cpus=0,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    )
                    .remote()
                )

    def _is_alive(self, node: str) -> bool:
        if node not in self._keepers:
            return False
        try:
            ray.get(self._keepers[node].paths.remote(), timeout=KEEPER_S)
        except ray.exceptions.RayActorError:
            return False
        return True


def name_on(node: str) -> str:
    """Return the name of a node's keeper, by which its workers find it; names are those of one job."""
    return f"state-keeper-{node}"


class KeeperOfNode:
    """The keeper of this worker's node: the `NodeMemory` of the engine."""

    def __init__(self) -> None:
        self.node = ray.get_runtime_context().get_node_id()
        self._keeper: Any = ray.get_actor(name_on(self.node))

    def files(self) -> dict[int, Path]:
        """Return the files by rank."""
        paths = ray.get(self._keeper.paths.remote(), timeout=KEEPER_S)
        return {rank: Path(path) for rank, path in paths.items()}

    def make(self, rank: int) -> Path:
        """Return a rank's file; an empty one is made if there is none."""
        return Path(ray.get(self._keeper.make.remote(rank), timeout=KEEPER_S))

    def keep_only(self, ranks: Collection[int]) -> None:
        """Free the memory of all other ranks."""
        ray.get(self._keeper.keep_only.remote(list(ranks)), timeout=KEEPER_S)
