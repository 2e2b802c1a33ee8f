"""The process group of workers of which a lost one is replaced while the others keep their state.

Ray Train calls such workers replica groups of one worker each: after the loss of a worker process it starts
another one in its place and calls `on_start` with it alone.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup

from trainyard_trainer.on_ray.controller.membership import MeetingPoint, invite, join
from trainyard_trainer.on_ray.controller.process_group import ProcessGroup, ProcessGroupBackend

ANSWER_S = 60.0
"""Seconds within which workers must answer an invitation; they answer at once."""


@dataclass(frozen=True)
class ReplaceableGroup(ProcessGroup):
    """The config of a process group of workers that are replaced one by one."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ReplaceableGroupBackend


class ReplaceableGroupBackend(ProcessGroupBackend):
    """The part of the process groups that Ray Train's controller runs."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if isinstance(worker_group, ReplicaGroup):
            self._replace(worker_group)
        else:
            self._begin(worker_group, backend_config)

    def _begin(self, group: Any, config: ProcessGroup) -> None:
        address, port = group.execute_single(0, get_address_and_port)
        self._group, self._name = group, uuid.uuid4().hex
        self._meeting = MeetingPoint(
            backend=config.backend,
            timeout_s=config.timeout_s,
            address=address,
            port=port,
            generation=0,
        )
        ray.get(
            [
                worker.execute_async(join, self._meeting, self._name, place)
                for worker, place in zip(group.get_workers(), self._places(), strict=True)
            ]
        )

    def _places(self) -> list[dict[str, str]]:
        """Return the places of the workers, by rank. One may have been replaced on another node."""
        return places_of([worker.metadata.node_id for worker in self._group.get_workers()])

    def _replace(self, replica: Any) -> None:
        """Invite a replacement and the other workers to the next process group.

        One of the others may be lost too. Then it is replaced next, which invites all anew.
        """
        (new,) = replica.get_workers()
        rank = new.distributed_context.world_rank
        self._meeting = replace(self._meeting, generation=self._meeting.generation + 1)
        try:
            if rank == 0:
                address, port = ray.get(new.execute_async(get_address_and_port), timeout=ANSWER_S)
                self._meeting = replace(self._meeting, address=address, port=port)
            ray.get(
                new.execute_async(join, self._meeting, self._name, self._places()[rank]),
                timeout=ANSWER_S,
            )
            for other in self._group.get_workers():
                if other.actor != new.actor:
                    self._invite(other)
        except ray.exceptions.RayError as error:
            raise WorkerGroupStartupFailedError(
                f"the replacement of worker {rank} could not join the others: {error}"
            ) from error

    def _invite(self, worker: Any) -> None:
        """Invite a worker. Raises WorkerGroupStartupFailedError if it has ended its training."""
        try:
            is_coming = ray.get(worker.execute_async(invite, self._meeting), timeout=ANSWER_S)
        except ray.exceptions.RayActorError:
            return
        if not is_coming:
            raise WorkerGroupStartupFailedError(
                f"worker {worker.distributed_context.world_rank} has ended its training already"
            )


def places_of(nodes: Sequence[str]) -> list[dict[str, str]]:
    """Return the variables that say which worker of its node each rank is. `nodes` has a node per rank."""
    order, seen, sizes = list(dict.fromkeys(nodes)), Counter[str](), Counter(nodes)
    places = []
    for node in nodes:
        places.append(
            {
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(sizes[node]),
                "NODE_RANK": str(order.index(node)),
            }
        )
        seen[node] += 1
    return places
