"""The process groups of a worker whose group can replace a lost worker, one process group after the other.

Ray Train's controller calls `join` and `invite` in the main thread of a worker's process. The thread that
trains takes part in the process groups. All process groups of a worker group are numbered; a worker goes to
the newest one to which it was invited, also while it waits for the members of an older one.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.on_ray.controller.peer_connections import PeerConnections

if TYPE_CHECKING:
    from torch import distributed

INVITATION_S = 120.0
"""How long a worker waits for a replacement of the lost one, in seconds, before it fails as well. Ray notices
a lost process within a second; the controller gives up before (`replace_or_restart.PLACE_S`)."""

STORE_S = 60.0
"""Seconds within which the key-value store must answer."""

STORE_TRY_S = 3.0
"""Seconds of one attempt to connect to the key-value store."""

CONNECT_S = 30.0
"""Seconds within which the members of a process group must have connected, once all of them are there."""

POLL_S = 0.02
"""Seconds between two looks whether all members are there."""

LOST_PEER = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Read error|writev)")
"""What gloo's errors say if the process at the other end of a connection has ended; they have no type of
their own. An operation that times out is none of these: then the other process still exists."""


class GroupClosed(RuntimeError):
    """An error: a worker was lost before this one could end, or before a process group was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """What all members of a process group must know."""

    backend: str
    timeout_s: float
    address: str
    """The address of rank 0."""
    port: int
    """The port of the key-value store that rank 0 keeps for all process groups until it is lost."""
    generation: int
    """The number of the process group: 0 for the first one of a worker group."""


class Membership:
    """The membership of this process in the newest process group: a `Regrouping` of the engine.

    All process groups of a rank 0 share one key-value store, in which each has its own prefix.
    """

    def __init__(
        self, meeting: MeetingPoint, kept: KeptFiles, *, rank: int, world_size: int
    ) -> None:
        """Join the first process group at once; a replacement joins its group when it trains."""
        self.is_replacement = meeting.generation > 0
        self.kept: KeptFiles | None = kept
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()
        self._invitations: queue.SimpleQueue[MeetingPoint] = queue.SimpleQueue()
        self._is_ended = False
        self._connections: PeerConnections | None = None
        self._stores: dict[tuple[str, int], distributed.TCPStore] = {}
        if rank == 0:
            self._store_at(meeting)
        if self.is_replacement:
            self.invite(meeting)
        else:
            self._join(meeting)

    def invite(self, meeting: MeetingPoint) -> bool:
        """Ask this worker to join another process group; returns whether it will.

        An operation with a worker whose node was lost would not fail by itself: nobody closes the connection.
        """
        with self._lock:
            if not self._is_ended:
                self._invitations.put(meeting)
                if self._connections:
                    self._connections.close()
            return not self._is_ended

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that another worker was lost."""
        if self._is_ended:
            return False
        return isinstance(error, GroupClosed) or LOST_PEER.search(str(error)) is not None

    def regroup(self, error: BaseException) -> None:
        """Leave the process group, and join the newest one. Raises the error if there is no invitation."""
        self._leave()
        while True:
            try:
                meeting = self._invitations.get(timeout=INVITATION_S)
            except queue.Empty:
                raise error from None
            try:
                self._join(meeting)
                return
            except RuntimeError as failed:
                # A member was lost meanwhile, and its replacement needs another process group.
                print(f"process group {meeting.generation} was not completed: {failed}", flush=True)
                self._leave()

    def finish(self) -> None:
        """Wait for the other workers, and refuse invitations from then on.

        Raises GroupClosed if there is one already, and gloo's error if a worker was lost before.
        """
        from torch import distributed

        if self._is_ended:
            return
        distributed.barrier()
        with self._lock:
            if not self._invitations.empty():
                raise GroupClosed("another worker was lost, and was replaced")
            self._is_ended = True
        if self.kept:
            self.kept.remove_states()

    def decline(self) -> None:
        """Refuse all invitations, so that the loss of a worker ends this one too."""
        with self._lock:
            self._is_ended = True
        self.kept = None

    def _join(self, meeting: MeetingPoint) -> None:
        """Join a process group. Raises RuntimeError if not all members do, or if there is a newer one."""
        from torch import distributed

        store = distributed.PrefixStore(f"generation-{meeting.generation}", self._store_at(meeting))
        self._await_members(store, meeting.timeout_s)

        def connect() -> None:
            distributed.init_process_group(
                meeting.backend,
                store=store,
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=CONNECT_S),
            )

        def gathered(value: object) -> list[object]:
            values: list[object] = [None] * self._world_size
            distributed.all_gather_object(values, value)
            return values

        connections = PeerConnections(connect, gathered)
        with self._lock:
            self._connections = connections
            if not self._invitations.empty():
                raise GroupClosed("there is a newer process group")
        distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=meeting.timeout_s))

    def _store_at(self, meeting: MeetingPoint) -> distributed.TCPStore:
        """Return the key-value store of rank 0, or a connection to it."""
        key = (meeting.address, meeting.port)
        if key not in self._stores:
            self._stores = {key: self._open_store(meeting)}
        return self._stores[key]

    def _open_store(self, meeting: MeetingPoint) -> distributed.TCPStore:
        """Open the store, or connect to it until there is a newer process group: its rank 0 may be lost."""
        from torch import distributed

        deadline = time.monotonic() + STORE_S
        while True:
            try:
                store = distributed.TCPStore(
                    meeting.address,
                    meeting.port,
                    is_master=self._rank == 0,
                    timeout=timedelta(seconds=STORE_TRY_S),
                    wait_for_workers=False,
                )
            except distributed.DistNetworkError:
                if not self._invitations.empty() or time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(timedelta(seconds=STORE_S))
                return store

    def _await_members(self, store: distributed.Store, timeout_s: float) -> None:
        """Wait until all members are about to connect.

        One that computes notices the loss only when it exchanges data. Another one that is lost is replaced.
        """
        store.set(f"member-{self._rank}", "")
        members = [f"member-{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + timeout_s
        while not store.check(members):
            if not self._invitations.empty():
                raise GroupClosed("there is a newer process group")
            if time.monotonic() > deadline:
                raise GroupClosed(f"not all members came within {timeout_s:g} s")
            time.sleep(POLL_S)

    def _leave(self) -> None:
        """Leave the process group at once, with operations under way.

        The operations of the other workers fail as well. Not all of them exchange data with the worker that
        was lost.
        """
        from torch import distributed

        with self._lock:
            if self._connections:
                self._connections.close()
                self._connections = None
        if distributed.is_initialized():
            distributed.destroy_process_group()


_membership: Membership | None = None
"""The membership of this worker process."""


def current() -> Membership | None:
    """Return the membership of this process; None if its worker group replaces no lost worker."""
    return _membership


def join(meeting: MeetingPoint, group: str, place: Mapping[str, str]) -> None:
    """Set the environment variables of PyTorch's launcher, and join the process group.

    `group` is a name for the files of the worker group. Workers of the first process group join at once, and
    a replacement when it trains.
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
        meeting, KeptFiles(session / f"kept-{group}"), rank=rank, world_size=world_size
    )


def invite(meeting: MeetingPoint) -> bool:
    """Ask this worker to join another process group; returns whether it will."""
    from ray.train.v2._internal.execution.context import get_train_context

    # The notice may be of the node that was lost. The controller looks for those of other nodes again.
    get_train_context().preemption_context.preemption_info = None
    return _membership is not None and _membership.invite(meeting)
