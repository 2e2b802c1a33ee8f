"""What an earlier worker group of the job holds is given back before the next one asks for places.

Ray Train removes a group's placement group as it ends the group, but not where Ray has killed one of its
workers for want of memory: its BackendSetupCallback expects RayActorError of a worker that is gone, which
OutOfMemoryError is not, and its controller ends. Ray keeps a placement group for as long as the job lives:
https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html#placement-group-lifetimes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)


class GiveBackPlaces(WorkerGroupCallback):
    """Each Ray Train controller of the job has one; only one of its worker groups is alive at a time."""

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        job = ray.get_runtime_context().get_job_id()
        for group in groups_of(job, placement_group_table()):
            print(f"the places of an earlier worker group are given back: {group}", flush=True)
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def groups_of(job: str, table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Placement groups of a job that hold or await places. Their ids end with the job's."""
    return [
        group for group, row in table.items() if group.endswith(job) and row["state"] != "REMOVED"
    ]
