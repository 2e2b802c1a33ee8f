"""The TCP connections between the members of a process group, so that a member can close them at any time.

gloo closes its connections when the last reference to the process group is gone, and its `abort` does not
close them. Until then, other members would wait for a member that has given up an operation.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The addresses of this and of the other end of a connection, each with its port."""


class PeerConnections:
    """The connections that this process has made to the other members of a process group."""

    def __init__(
        self, join: Callable[[], None], gathered: Callable[[object], list[object]]
    ) -> None:
        """Join a process group by `join`. All members must call it.

        `gathered` returns on each member what all members of the group have passed. A connection that was
        made meanwhile belongs to the group if another member has its other end.
        """
        before = open_connections()
        join()
        new = {fd: ends for fd, ends in open_connections().items() if before.get(fd) != ends}
        told = gathered(list(new.values()))
        others = {ends for each in told for ends in each}  # type: ignore[attr-defined]
        self._of_group = {
            fd: (here, there) for fd, (here, there) in new.items() if (there, here) in others
        }

    def close(self) -> None:
        """Shut down the connections. Operations under way fail, here and on the other members."""
        still = open_connections(self._of_group)
        for fd, ends in self._of_group.items():
            if still.get(fd) == ends:
                with suppress(OSError), socket_of(fd) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._of_group = {}


def open_connections(fds: Iterable[int] | None = None) -> Mapping[int, Ends]:
    """Return the TCP connections of this process, or those among some file descriptors."""
    found = {}
    for fd in open_files() if fds is None else fds:
        # Most are no socket, are not connected, or are closed by another thread in this moment.
        with suppress(OSError), socket_of(fd) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                here, there = connection.getsockname(), connection.getpeername()
                found[fd] = ((here[0], here[1]), (there[0], there[1]))
    return found


def open_files() -> list[int]:
    """Return the file descriptors of this process."""
    return [int(each.name) for each in Path("/dev/fd").iterdir()]


def socket_of(fd: int) -> socket.socket:
    """Return a socket with a copy of a file descriptor. Raises OSError if it is not one of a socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
