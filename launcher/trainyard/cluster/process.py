"""A command in a container of a pod, over one websocket: its output, then its exit code."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from trainyard.errors import ClusterError, ClusterUnreachable

STDIN, STDOUT, STDERR, STATUS, RESIZE = range(5)
TEXT, BINARY, CLOSE = 1, 2, 8
"""The opcodes of websocket frames."""
SILENCE_S = 60.0
"""For how many seconds one read waits for output."""


class PodProcess:
    """A command that runs in a container of a pod.

    Frames are read from the socket directly, because the client copies its whole buffer for each frame, which
    takes minutes for the bytes of a checkpoint.
    """

    def __init__(self, websocket: Any, what: str) -> None:
        self._websocket = websocket
        self._what = what
        self._status = b""
        self.is_open = True
        """Whether more output may arrive."""

    def __enter__(self) -> PodProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._websocket.close()

    def output(self) -> Iterator[tuple[int, bytes]]:
        """Yield pieces of standard output (1) and standard error (2) until the command has ended."""
        while self.is_open:
            yield from self.read(SILENCE_S)

    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield the pieces that have arrived, after waiting up to `timeout_s` for the first one."""
        from websocket import WebSocketConnectionClosedException, WebSocketException

        while self.is_open and self._has_come(timeout_s):
            try:
                kind, frame = self._websocket.sock.recv_data_frame(True)
            except WebSocketConnectionClosedException:
                self.is_open = False
                return
            except (WebSocketException, OSError) as error:
                raise ClusterUnreachable(
                    f"the connection to {self._what} broke", str(error)
                ) from error
            self.is_open = kind != CLOSE
            if kind in (TEXT, BINARY) and frame.data:
                channel, data = frame.data[0], frame.data[1:]
                if channel == STATUS:
                    self._status += data
                elif channel in (STDOUT, STDERR) and data:
                    yield channel, data
            timeout_s = 0

    def _has_come(self, timeout_s: float) -> bool:
        """Return whether a frame can be read; TLS may hold it in its own buffer already."""
        socket = self._websocket.sock.sock
        if socket is None:
            self.is_open = False
            return False
        if getattr(socket, "pending", lambda: 0)():
            return True
        return bool(select.select([socket], [], [], timeout_s)[0])

    def write(self, data: bytes) -> None:
        """Write to the standard input of the command."""
        from websocket import WebSocketException

        try:
            self._websocket.write_channel(STDIN, data)
        except (WebSocketException, OSError) as error:
            raise ClusterUnreachable(f"the connection to {self._what} broke", str(error)) from error

    def end_input(self) -> None:
        """Close the standard input of the command."""
        self._websocket.close_channel(STDIN)

    def resize(self, columns: int, rows: int) -> None:
        """Tell the command the size of the terminal."""
        size = json.dumps({"Width": columns, "Height": rows}).encode()
        self._websocket.write_channel(RESIZE, size)

    def fileno(self) -> int:
        """Return the file descriptor of the socket, for `select`."""
        return int(self._websocket.sock.sock.fileno())

    @property
    def exit_code(self) -> int:
        """The exit code. Raises ClusterError if the command did not start or its end was not reported."""
        if not self._status:
            raise ClusterUnreachable(
                f"the connection to {self._what} broke before its exit code arrived"
            )
        status = json.loads(self._status)
        if status["status"] == "Success":
            return 0
        for cause in (status.get("details") or {}).get("causes", []):
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise ClusterError(
            f"{self._what} could not be started",
            str(status.get("message", "")),
            reason=status.get("reason", ""),
        )
