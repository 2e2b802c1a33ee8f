"""Remove the placement groups of earlier worker groups before a new worker group requests resources.

Ray Train removes the placement group when it ends a worker group. It does not do so after Ray has killed a
worker because the node ran out of memory: BackendSetupCallback expects RayActorError from a dead worker, but
gets OutOfMemoryError, which is not one, and the controller ends. Ray then keeps the placement group until the
job ends:
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
    """A callback that removes the placement groups of the job's earlier worker groups."""

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        job = ray.get_runtime_context().get_job_id()
        for group in groups_of(job, placement_group_table()):
            print(f"removing the placement group of an earlier worker group: {group}", flush=True)
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def groups_of(job: str, table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the IDs of a job's placement groups that are not removed. They end with the ID of the job."""
    return [
        group for group, row in table.items() if group.endswith(job) and row["state"] != "REMOVED"
    ]
