"""Copies of the workers' kept states on other nodes, which outlive the loss of a worker's own node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch import distributed
from torch.distributed import ProcessGroup

from trainyard_trainer.engine.kept_state import KeptState, StateFile
from trainyard_trainer.parallel.worker import Worker

FileOf = Callable[[int], Path]
"""Returns the path of the file that this node has, or is to have, with the state of a rank."""


def holders_of_copies(nodes: Sequence[str]) -> dict[int, int]:
    """Return which rank has the copy of each rank's state: the next one on another node.

    `nodes` has the node of each rank. With a single node there are no copies.
    """
    found = {}
    for rank, node in enumerate(nodes):
        others = (*range(rank + 1, len(nodes)), *range(rank))
        holder = next((other for other in others if nodes[other] != node), None)
        if holder is not None:
            found[rank] = holder
    return found


class NeighbourCopies:
    """The copy of this worker's state that another worker has, and those that this worker has of others."""

    def __init__(
        self, own: KeptState, worker: Worker, holder_of: Mapping[int, int], file_of: FileOf
    ) -> None:
        """Open the files of the copies that this worker has. All workers must call it.

        `holder_of` says which rank has the copy of each rank's state.
        """
        self._own = own
        self._holder = holder_of.get(worker.rank)
        sizes: list[int] = worker.gathered(own.state_bytes)
        self._copies = {
            rank: StateFile(file_of(rank), slots=own.slots, state_bytes=sizes[rank])
            for rank, holder in holder_of.items()
            if holder == worker.rank
        }

    def exchange(
        self, step: int, *, group: ProcessGroup | None = None, timeout: timedelta = timedelta()
    ) -> None:
        """Send this worker's state after a step to the one that has the copy, and receive those of others.

        All workers must call it. Without `timeout` it waits as long as the process group does.
        """
        works = []
        if self._holder is not None:
            works.append(distributed.isend(self._own.state(step), dst=self._holder, group=group))
        for rank, copy in self._copies.items():
            works.append(distributed.irecv(copy.begin(step), src=rank, group=group))
        for work in works:
            assert work is not None
            work.wait(timeout)
        for copy in self._copies.values():
            copy.commit(step)


def hand_over(own: KeptState, step: int, ranks: tuple[int, int, int], file_of: FileOf) -> None:
    """Send a worker's state after a step from a node that has it to the node of that worker.

    `ranks` are those of this worker, of the one whose state it is, and of one on the node that has it. All
    but the last two do nothing.
    """
    rank, owner, holder = ranks
    if rank == holder:
        distributed.send(StateFile.found(file_of(owner), slots=own.slots).state(step), dst=owner)
    elif rank == owner:
        distributed.recv(own.begin(step), src=holder)
        own.commit(step)
