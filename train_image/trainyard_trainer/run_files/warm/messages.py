"""The messages between a command and the warm process, and the folder in which they find each other.

Each message is JSON, after its length. The warm process answers a connection with a greeting: its facts and
its state. The command then asks for a run, or for the end of the warm process, or closes the connection. The
answer to RUN brings two sockets:

* The first leads to the driver of the run. The command sends it the environment, so that the warm process
  never has it, and the standard streams. The driver answers with READY and STARTED.
* The second leads to the fork server of the run, the driver's parent. It passes on each signal whose number
  it receives as a byte, and sends the driver's `waitpid` status.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard_trainer.run_files.unix_sockets import peer_of

SOCKET = "socket"
LOCK = "lock"
LOG = "log"
"""The files of the warm process in its folder."""

RUN = "run"
DOWN = "down"
"""What a command may ask for."""

READY = b"R"
"""The process that will run a program has started its Ray."""

STARTED = b"S"
"""The process has all that it needs, and runs the program."""

ANSWER_S = 5.0
"""Seconds within which the warm process must answer."""

MOST_BYTES = 64 * 1024**2
"""Bytes that a message may have."""


class WarmFolderError(Exception):
    """The folder of the warm process cannot be trusted; the message says why."""


def folder_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's warm process."""
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return Path(runtime, "trainyard")
    return Path(tempfile.gettempdir(), f"trainyard-warm-{os.getuid()}")


def require_own(folder: Path) -> None:
    """Raise WarmFolderError if another user may use a folder. Raises FileNotFoundError if there is none."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise WarmFolderError(f"{folder} is not a folder of this user")
    if status.st_mode & 0o077:
        raise WarmFolderError(f"{folder} may be used by other users: its mode is not 700")


def is_locked(folder: Path) -> bool:
    """Return whether a warm process has the folder, also one that still starts."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def connect(folder: Path) -> socket.socket | None:
    """Return a connection to the warm process, or None if there is no such process.

    Raises WarmFolderError.
    """
    try:
        require_own(folder)
    except FileNotFoundError:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect(address(folder))
        require_own_peer(connection)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def address(folder: Path) -> str:
    """Return the path of the socket."""
    return str(folder / SOCKET)


def require_own_peer(connection: socket.socket) -> int:
    """Return the process at the other end. Raises WarmFolderError if it belongs to another user."""
    process, user = peer_of(connection)
    if user != os.getuid():
        raise WarmFolderError("the process at the other end of the socket belongs to another user")
    return process


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message, which is made of JSON values, and file descriptors with it."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [struct.pack("I", len(body))], descriptors)
    connection.sendall(body)


def receive(connection: socket.socket, most_descriptors: int = 0) -> tuple[Any, list[int]]:
    """Receive a message and its file descriptors.

    Raises EOFError if the other end has closed the connection, and ValueError if it is no message.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, 4, most_descriptors)
    if len(head) < 4:
        raise EOFError
    (left,) = struct.unpack("I", head)
    if left > MOST_BYTES:
        raise ValueError(f"a message of {left} bytes")
    parts = []
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), list(descriptors)
