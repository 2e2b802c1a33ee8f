"""What a worker with DDP alone has after its newest steps: on its node, and on that of another worker.

All workers have the same weights, but each has loss sums of its own, and only rank 0 has the buffers that
count. The worker that takes the place of a lost one needs both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from torch import Tensor

from trainyard_trainer.engine.kept_state import KeptState, StateFile
from trainyard_trainer.engine.neighbours import NeighbourCopies, hand_over, holders_of_copies
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
        self._own = KeptState(files.state(worker.rank), like, slots=SLOTS)
        self._copies: NeighbourCopies | None = None

    def join_group(self, nodes: Sequence[str]) -> None:
        """Agree on who keeps whose state. `nodes` has the node of each rank; all workers must call it."""
        self._copies = NeighbourCopies(
            self._own, self._worker, holders_of_copies(nodes), self._files.state
        )

    def write(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Keep the state after a step, here and on another node. All workers must call it."""
        self._own.write(step, tensors)
        if self._copies:
            self._copies.exchange(step, timeout=self._timeout)

    def read(self, step: int) -> list[Tensor]:
        """Return this worker's state after a step, which further steps overwrite.

        Raises RunError if it is not kept.
        """
        return self._own.read(step)

    def fetch(self, step: int, replaced: Collection[int]) -> None:
        """Bring the states after a step to those of the replaced workers that lack it on their node.

        All workers must call it. Raises RunError on all of them if a state is kept nowhere.
        """
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
            hand_over(self._own, step, (self._worker.rank, rank, holder), self._files.state)

    def _steps_of(self, rank: int) -> list[int]:
        """Return the steps after which this node has the state of a worker."""
        path = self._files.state(rank)
        return StateFile.found(path, slots=SLOTS).steps() if path.exists() else []
