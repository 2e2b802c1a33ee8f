"""Keep the newest state of a run in memory that outlives its workers, on more than one node.

After the loss of a worker of a sharded model all workers start again, since each shard exists once. With DDP
they do so where lost workers cannot be replaced, as on GPUs. The state after the newest steps is still in the
memory of their nodes, and all workers go on from the newest step of which all parts are kept:

* What a worker alone has, such as its shards, is kept on its node. A worker on another node has a copy.
* What all workers have alike, such as the weights with DDP, is kept by one worker of each node.

Keeping states takes at most COST_SHARE of the time of the steps: it is done after every so many of them as
this needs. Sending a copy to the other node runs beside the steps.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from trainyard_trainer.engine.kept_state import KeptState, StateFile
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.learner_tensors import LearnerTensors
from trainyard_trainer.engine.neighbours import NeighbourCopies, hand_over, holders_of_copies
from trainyard_trainer.errors import RunError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Trained

SLOTS = 2
"""The number of steps whose state is kept of each rank: while one is written, the other is complete."""

COST_SHARE = 0.01
"""The greatest share of the time of training that keeping the state may take."""

MEASURED = 16
"""The number of states over which the time is measured."""

MEASURED_FIRST = 4
"""The same for the first states of a worker group, which are kept after every step."""

HEADER_BYTES = 2**16
"""The room for what a state has beside its tensors, as JSON."""

COMMON = -1
"""In place of a rank: the state that all workers have alike."""


class NodeMemory(Protocol):
    """Files in the memory of this worker's node that outlive the worker, one for each rank and for COMMON."""

    node: str
    """The id of the node."""

    def files(self) -> dict[int, Path]:
        """Return the files by rank."""

    def make(self, rank: int) -> Path:
        """Return a rank's file; an empty one is made if there is none."""

    def keep_only(self, ranks: Collection[int]) -> None:
        """Free the memory of all other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStart:
    """A step of whose state all parts are kept."""

    trained: Trained
    group: int
    """The worker group that has made the step."""
    learner: Mapping[str, Any]
    """The learner's state beside its tensors."""
    holders: tuple[int, ...]
    """For each rank a worker that can read the state of this rank from the memory of its node."""
    common_holder: int | None
    """A worker that can read what all workers have alike; None if they have nothing alike."""


def kept_start(memory: NodeMemory, worker: Worker) -> KeptStart | None:
    """Return the newest step of which the nodes have all parts of the state. All workers must call it.

    States of another number of workers do not count, because their shards are other parts of the model.
    """
    found: list[dict[int, list[Any]]] = worker.gathered(
        {rank: headers_in(path) for rank, path in memory.files().items()}
    )
    holders: dict[tuple[int, int], dict[int, int]] = {}
    headers: dict[tuple[int, int], Any] = {}
    for holder, ranks in enumerate(found):
        for rank, states in ranks.items():
            for header in states:
                if header["world_size"] != worker.world_size:
                    continue
                at = (header["group"], header["trained"]["step"])
                of_step = holders.setdefault(at, {})
                if rank == holder or rank not in of_step:
                    of_step[rank] = holder
                if rank == 0:
                    headers[at] = header
    ranks_and_common = {
        at: {*range(worker.world_size), *([COMMON] if header["has_common"] else [])}
        for at, header in headers.items()
    }
    complete = [at for at, needed in ranks_and_common.items() if needed <= holders[at].keys()]
    if not complete:
        return None
    newest = max(complete)
    return KeptStart(
        trained=Trained(**headers[newest]["trained"]),
        group=newest[0],
        learner=headers[newest]["learner"],
        holders=tuple(holders[newest][rank] for rank in range(worker.world_size)),
        common_holder=holders[newest].get(COMMON),
    )


def headers_in(path: Path) -> list[dict[str, Any]]:
    """Return the headers of all states in a file of a node's memory."""
    if not path.stat().st_size:  # it was made, and nothing was kept in it
        return []
    file = StateFile.found(path, slots=SLOTS)
    return [decoded(file.state(step)[:HEADER_BYTES]) for step in file.steps()]


class StateCopies:
    """The newest state of this worker in the memory of its node, and the copies that it has of others.

    All workers must call each of its methods alike.
    """

    def __init__(self, memory: NodeMemory, worker: Worker, group: int, learner: Learner) -> None:
        """`group` is the number of the worker group, which its states have."""
        self._memory, self._worker, self._group = memory, worker, group
        self._learner, self._tensors = learner, LearnerTensors(learner)
        self._has_common = bool(self._tensors.common())
        nodes: list[str] = worker.gathered(memory.node)
        self._holder_of = holders_of_copies(nodes)
        here = {rank for rank, node in enumerate(nodes) if node == memory.node}
        self._keeps_common = self._has_common and worker.rank == min(here)
        self._needed_here = here | {
            rank for rank, holder in self._holder_of.items() if holder in here
        }
        if self._has_common:
            self._needed_here.add(COMMON)
        # Copies are sent during training, so they need a separate process group from that of the training.
        self._process_group = distributed.new_group(backend="gloo") if self._holder_of else None
        self._own: KeptState | None = None
        self._common: KeptState | None = None
        self._copies: NeighbourCopies | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-copies")
        self._sent: Future[None] = Future()
        self._sent.set_result(None)
        self._every = 1
        self._next_step = 0
        self._pace = Pace(MEASURED_FIRST)

    def close(self) -> None:
        """Wait until the last state has been sent."""
        self._sent.result()
        self._thread.shutdown()

    def load(self, start: KeptStart, sums: Tensor) -> None:
        """Load this rank's state of a step, wherever it is kept, with the sums of its epoch.

        The learner has made no pass yet: a sharded model may keep gathered weights after one.
        """
        self._tensors.make_optimizer_state()
        tensors = [sums, *self._tensors.own()]
        own = self._open(tensors)
        for owner, holder in enumerate(start.holders):
            if owner != holder:  # it is on another node than before
                ranks = (self._worker.rank, owner, holder)
                hand_over(own, start.trained.step, ranks, self._memory.make)
        header, *kept = own.read(start.trained.step)
        assert decoded(header)["group"] == start.group
        with torch.no_grad():
            torch._foreach_copy_(tensors, kept)
            if start.common_holder is not None:
                self._load_common(start.trained.step, start.common_holder)
        self._learner.load_beside_tensors(start.learner)

    def _load_common(self, step: int, holder: int) -> None:
        """Load what all workers have alike, which one of them sends to the others."""
        tensors = self._tensors.common()
        if self._worker.rank == holder:
            _, *kept = self._open_common(tensors).read(step)
            torch._foreach_copy_(tensors, kept)
        if self._worker.world_size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=holder)

    def _open(self, tensors: Sequence[Tensor]) -> KeptState:
        """Return this worker's file, with room for such tensors, and open those of the copies."""
        like = with_header(tensors)
        if self._own is None or not self._own.fits(like):
            self._own = KeptState(self._memory.make(self._worker.rank), like, slots=SLOTS)
            if self._process_group:
                self._copies = NeighbourCopies(
                    self._own, self._worker, self._holder_of, self._memory.make
                )
        return self._own

    def _open_common(self, tensors: Sequence[Tensor]) -> KeptState:
        """Return the file of this node for what all workers have alike, with room for such tensors."""
        like = with_header(tensors)
        if self._common is None or not self._common.fits(like):
            self._common = KeptState(self._memory.make(COMMON), like, slots=SLOTS)
        return self._common

    def begin(self, trained: Trained, sums: Tensor) -> None:
        """Keep the state from which this worker group starts, and free the memory of all older ones.

        When it returns, the state of each rank is wherever it has to be. Without a step there is none.
        """
        if trained.step:
            self._keep(trained, sums)
            self._sent.result()
        self._worker.gathered(None)
        self._memory.keep_only(self._needed_here)

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be kept; the same on all workers."""
        return step >= self._next_step

    def keep(self, trained: Trained, sums: Tensor) -> None:
        """Keep the state after a step, and decide after which step the next one is kept."""
        began = time.monotonic()
        self._keep(trained, sums)
        self._pace.note(trained.step, began, time.monotonic())
        if self._pace.is_full:
            # All workers keep the states of the same steps: the slowest one counts.
            share = max(self._worker.gathered(self._pace.share_of_each_step()))
            self._every = max(math.ceil(share / COST_SHARE), 1)
            self._pace = Pace(MEASURED)
        self._next_step = trained.step + self._every

    def _keep(self, trained: Trained, sums: Tensor) -> None:
        # The slot that is written now was sent the last time but one.
        self._sent.result()
        header = encoded(
            {
                "group": self._group,
                "world_size": self._worker.world_size,
                "has_common": self._has_common,
                "trained": asdict(trained),
                "learner": self._learner.state_beside_tensors(),
            }
        )
        if self._keeps_common:
            common = self._tensors.common()
            self._open_common(common).write(trained.step, [header, *common])
        tensors = [sums, *self._tensors.own()]
        self._open(tensors).write(trained.step, [header, *tensors])
        if self._copies:
            self._sent = self._thread.submit(
                self._copies.exchange, trained.step, group=self._process_group
            )


class Pace:
    """How long it takes to keep states, and to make the steps between them."""

    def __init__(self, states: int) -> None:
        """`states` is the number of states over which the time is measured."""
        self._states = states
        self._times: list[tuple[int, float, float]] = []

    def note(self, step: int, began: float, ended: float) -> None:
        """Note that the state after a step was kept between these times, in seconds."""
        self._times.append((step, began, ended))

    @property
    def is_full(self) -> bool:
        """Whether enough states were kept to tell."""
        return len(self._times) >= self._states

    def share_of_each_step(self) -> float:
        """Return the time to keep a state, as a share of the time to make a step."""
        kept_s = statistics.median(ended - began for _, began, ended in self._times)
        pairs = pairwise(self._times)
        step_s = statistics.median(
            (began - ended) / max(later - step, 1) for (step, _, ended), (later, began, _) in pairs
        )
        return kept_s / max(step_s, 1e-9)


def with_header(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the shapes and data types that a state with these tensors has."""
    return [torch.empty(HEADER_BYTES, dtype=torch.uint8), *tensors]


def encoded(header: Mapping[str, Any]) -> Tensor:
    """Return a header as bytes. Raises RunError if it is too long."""
    content = json.dumps(header).encode()
    if len(content) > HEADER_BYTES:
        raise RunError(
            f"the progress of the run takes {len(content)} bytes as JSON, and at most {HEADER_BYTES} can be "
            "kept in memory. Declare fewer metrics, or remove faults.keep_state."
        )
    padding = bytes(HEADER_BYTES - len(content))
    return torch.frombuffer(bytearray(content + padding), dtype=torch.uint8)


def decoded(header: Tensor) -> Any:
    """Return the header of a state from its bytes."""
    return json.loads(header.numpy().tobytes().rstrip(b"\0"))
