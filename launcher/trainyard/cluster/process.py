"""A command in a container of a pod, over one websocket: its output as it comes, then its exit code."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from trainyard.errors import ClusterError, ClusterUnreachable

STDIN, STDOUT, STDERR, STATUS, RESIZE = range(5)
TEXT, BINARY, CLOSE = 1, 2, 8
"""Kinds of frames of a websocket."""
SILENCE_S = 60.0
"""Between two looks at a command that says nothing."""


class PodProcess:
    """A command that runs in a pod. What it writes comes in the order in which it was written.

    The frames are taken from the socket one by one: the client's own buffer is copied with each of them,
    which takes minutes for what a checkpoint has.
    """

    def __init__(self, websocket: Any, what: str) -> None:
        self._websocket = websocket
        self._what = what
        self._status = b""
        self.is_open = True
        """Whether it may still say something."""

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
        """Pieces of standard output (1) and standard error (2), until the command has ended."""
        while self.is_open:
            yield from self.read(SILENCE_S)

    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        """All that has come until now, after waiting for some of it."""
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
        """Whether there is a frame to take; TLS may have read it from the socket already."""
        socket = self._websocket.sock.sock
        if socket is None:
            self.is_open = False
            return False
        if getattr(socket, "pending", lambda: 0)():
            return True
        return bool(select.select([socket], [], [], timeout_s)[0])

    def write(self, data: bytes) -> None:
        """Give it something to read."""
        from websocket import WebSocketException

        try:
            self._websocket.write_channel(STDIN, data)
        except (WebSocketException, OSError) as error:
            raise ClusterUnreachable(f"the connection to {self._what} broke", str(error)) from error

    def end_input(self) -> None:
        """There is nothing more to read for it."""
        self._websocket.close_channel(STDIN)

    def resize(self, columns: int, rows: int) -> None:
        """Tell it the size of the terminal."""
        size = json.dumps({"Width": columns, "Height": rows}).encode()
        self._websocket.write_channel(RESIZE, size)

    def fileno(self) -> int:
        """For `select`."""
        return int(self._websocket.sock.sock.fileno())

    @property
    def exit_code(self) -> int:
        """How it ended. Raises ClusterError where it did not start, or its end was not told."""
        if not self._status:
            raise ClusterUnreachable(
                f"the connection to {self._what} broke before its end was told"
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
