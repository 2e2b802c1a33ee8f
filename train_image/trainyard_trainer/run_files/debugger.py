"""The socket at which a terminal reaches the debugger of a worker."""

from __future__ import annotations

from pathlib import Path


def socket_name(process: int) -> str:
    """Return the abstract name of the socket at which the worker of a process id waits for a terminal.

    Containers that share a network see each other's sockets, and may have processes of the same id.
    """
    return f"\0trainyard-debugger-{Path('/proc/self/ns/pid').stat().st_ino}-{process}"
