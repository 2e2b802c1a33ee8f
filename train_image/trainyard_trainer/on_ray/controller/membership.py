"""The process groups of a worker whose group can replace a lost worker, one process group after the other.

Ray Train's controller calls `join`, `join_later` and `invite` in the main thread of a worker's process. The
thread that trains takes part in the process group.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from trainyard_trainer.on_ray.controller.peer_connections import PeerConnections

INVITATION_S = 60.0
"""How long a worker waits for a replacement of the lost one, in seconds, before it fails as well. Ray notices
a lost process within a second, and starts another within 15 s on a busy machine."""

LOST_PEER = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Read error|writev)")
"""What gloo's errors say if the process at the other end of a connection has ended; they have no type of their
own. A collective operation that times out is none of these: then the other process still exists."""


class GroupClosed(RuntimeError):
    """An error: another worker was lost before this one could end, and has been replaced already."""


class State(Enum):
    """What a worker does with regard to its process group."""

    MEMBER = "is a member, or waits for an invitation"
    INVITED = "was invited to the next process group, and has not joined it yet"
    ENDED = "has made its last collective operation"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """What all members of a process group must know."""

    backend: str
    timeout_s: float
    address: str
    """The address of rank 0, which is never replaced."""
    port: int
    """The port of the key-value store that rank 0 keeps for all process groups of a worker group."""


class Membership:
    """The membership of this process in the newest process group: a `Regrouping` of the engine.

    All process groups share one key-value store, in which each has its own prefix.
    """

    def __init__(
        self, meeting: MeetingPoint, sums_file: Path, *, rank: int, world_size: int, generation: int
    ) -> None:
        from torch import distributed

        self.is_replacement = generation > 0
        self.sums_file: Path | None = sums_file
        self._meeting, self._rank, self._world_size = meeting, rank, world_size
        self._lock = threading.Lock()
        self._invitations: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._state = State.MEMBER
        self._connections: PeerConnections | None = None
        self._store = distributed.TCPStore(
            meeting.address,
            meeting.port,
            is_master=rank == 0,
            timeout=timedelta(seconds=meeting.timeout_s),
            wait_for_workers=False,
        )
        if self.is_replacement:
            self.invite(generation)
        else:
            self._join(generation)

    def invite(self, generation: int) -> bool:
        """Ask this worker to join another process group; returns whether it will."""
        with self._lock:
            if self._state is not State.MEMBER:
                return False
            self._state = State.INVITED
            self._invitations.put(generation)
            return True

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that another worker was lost."""
        return isinstance(error, GroupClosed) or LOST_PEER.search(str(error)) is not None

    def regroup(self, error: BaseException) -> None:
        """Leave the process group, and join the next one. Raises the error if there is no invitation."""
        self._leave()
        try:
            generation = self._invitations.get(timeout=INVITATION_S)
        except queue.Empty:
            raise error from None
        self._join(generation)
        with self._lock:
            self._state = State.MEMBER

    def finish(self) -> None:
        """Refuse invitations from now on. Raises GroupClosed if there is one already."""
        with self._lock:
            if self._state is State.INVITED:
                raise GroupClosed("another worker was lost, and was replaced")
            self._state = State.ENDED
        if self.sums_file:
            self.sums_file.unlink(missing_ok=True)

    def _join(self, generation: int) -> None:
        from torch import distributed

        def join() -> None:
            distributed.init_process_group(
                self._meeting.backend,
                store=distributed.PrefixStore(f"generation-{generation}", self._store),
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=self._meeting.timeout_s),
            )

        def gathered(value: object) -> list[object]:
            values: list[object] = [None] * self._world_size
            distributed.all_gather_object(values, value)
            return values

        self._connections = PeerConnections(join, gathered)

    def _leave(self) -> None:
        """Leave the process group at once, with operations under way.

        The operations of the other workers fail as well. Not all of them exchange data with the worker that
        was lost.
        """
        from torch import distributed

        if self._connections:
            self._connections.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()


_membership: Membership | None = None
"""The membership of this worker process."""


def current() -> Membership | None:
    """Return the membership of this process; None if its worker group replaces no lost worker."""
    return _membership


def join(meeting: MeetingPoint, place: Mapping[str, str], generation: int) -> None:
    """Set the environment variables of PyTorch's launcher, and join the process group.

    Workers of the first generation join at once, and a replacement when it trains.
    """
    import ray
    import ray.train.torch

    global _membership
    context: Any = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    os.environ |= {
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "ACCELERATE_TORCH_DEVICE": str(ray.train.torch.get_device()),
        **place,
    }
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    _membership = Membership(
        meeting,
        session / f"loss-sums-{meeting.port}-{rank}",
        rank=rank,
        world_size=world_size,
        generation=generation,
    )


def invite(generation: int) -> bool:
    """Ask this worker to join another process group; returns whether it will."""
    return _membership is not None and _membership.invite(generation)
