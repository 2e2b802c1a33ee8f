"""Sockets between processes of one machine or pod."""

from __future__ import annotations

import socket
import struct
from pathlib import Path


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end of a Unix socket."""
    process, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return process, user


def debugger_socket(process: int) -> str:
    """Return the abstract name of the socket at which the worker of a process id waits for a terminal.

    Containers that share a network see each other's sockets, and may have processes of the same id.
    """
    return f"\0trainyard-debugger-{Path('/proc/self/ns/pid').stat().st_ino}-{process}"
