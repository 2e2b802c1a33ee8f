"""What a worker with DDP alone has after its newest steps: on its node, and on that of another worker.

All workers have the same weights, but each has loss sums of its own, and only rank 0 has the buffers that
count. The worker that takes the place of a lost one needs both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from torch import Tensor, distributed

from trainyard_trainer.engine.kept_state import KeptState, StateFile, bytes_like, bytes_of
from trainyard_trainer.engine.state_copies import holders_of_copies
from trainyard_trainer.errors import RunError
from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.parallel.worker import Worker

SLOTS = 4
"""The number of steps whose state is kept of each worker. Workers are never more than two steps apart."""


class OwnState:
    """The state of this worker after its newest steps, and the states that it keeps of others.

    A worker keeps its state before it takes part in the exchange of a step's gradients. By then it has also
    received those that it keeps of others. So if any worker has completed a step, all states after it are
    kept.
    """

    def __init__(
        self, files: KeptFiles, worker: Worker, like: Sequence[Tensor], timeout_s: float
    ) -> None:
        """Open the file of this worker for tensors of these shapes and data types, or create it.

        Another worker may be at a step for `timeout_s` seconds.
        """
        self._files, self._worker = files, worker
        self._timeout = timedelta(seconds=timeout_s)
        files.folder.mkdir(parents=True, exist_ok=True)
        self._size = bytes_of(like)
        self._own = KeptState(files.state(worker.rank), like, slots=SLOTS)
        self._holder: int | None = None
        self._copies: dict[int, KeptState] = {}

    def join_group(self, nodes: Sequence[str]) -> None:
        """Agree on who keeps whose state. `nodes` has the node of each rank; all workers must call it."""
        rank, holders = self._worker.rank, holders_of_copies(nodes)
        sizes: list[int] = self._worker.gathered(self._size)
        self._holder = holders.get(rank)
        self._copies = {
            other: KeptState(self._files.state(other), [bytes_like(sizes[other])], slots=SLOTS)
            for other, holder in holders.items()
            if holder == rank
        }

    def write(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Keep the state after a step, here and on another node. All workers must call it."""
        self._own.write(step, tensors)
        works = []
        if self._holder is not None:
            works.append(distributed.isend(self._own.state(step), dst=self._holder))
        for rank, copy in self._copies.items():
            works.append(distributed.irecv(copy.begin(step), src=rank))
        for work in works:
            assert work is not None
            work.wait(self._timeout)
        for copy in self._copies.values():
            copy.commit(step)

    def read(self, step: int) -> list[Tensor]:
        """Return this worker's state after a step, which further steps overwrite.

        Raises RunError if it is not kept.
        """
        return self._own.read(step)

    def fetch(self, step: int, replaced: Collection[int]) -> None:
        """Bring the states after a step to those of the replaced workers that lack it on their node.

        All workers must call it. Raises RunError on all of them if a state is kept nowhere.
        """
        me = self._worker.rank
        found: list[set[int]] = self._worker.gathered(
            {rank for rank in replaced if step in self._steps_of(rank)}
        )
        for rank in replaced:
            if rank in found[rank]:
                continue
            holder = next((other for other, ranks in enumerate(found) if rank in ranks), None)
            if holder is None:
                raise RunError(
                    f"the state of worker {rank} after step {step} was lost with its node, and no other node "
                    "has it"
                )
            if me == holder:
                kept = StateFile.found(self._files.state(rank), slots=SLOTS)
                distributed.send(kept.state(step), dst=rank)
            elif me == rank:
                distributed.recv(self._own.begin(step), src=holder)
                self._own.commit(step)

    def _steps_of(self, rank: int) -> list[int]:
        """Return the steps after which this node has the state of a worker."""
        path = self._files.state(rank)
        return StateFile.found(path, slots=SLOTS).steps() if path.exists() else []
