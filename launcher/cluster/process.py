"""A command in a container of a pod, over one websocket: its output as it comes, then its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from launcher.errors import ClusterError, ClusterUnreachable

STDIN, STDOUT, STDERR, STATUS, RESIZE = range(5)
SILENCE_S = 60.0
"""Between two looks at a command that says nothing."""


class Process:
    """A command that runs in a pod. What it writes comes in the order in which it was written."""

    def __init__(self, websocket: Any, what: str) -> None:
        self._websocket = websocket
        self._what = what
        self._code: int | None = None
        self._status = b""

    def __enter__(self) -> Process:
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
        while self._websocket.is_open():
            yield from self.read(SILENCE_S)
        yield from self.read(0)

    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        """What has come until now, after waiting for some of it."""
        from websocket import WebSocketException  # what the client's own module is built on

        try:
            self._websocket.update(timeout=timeout_s)
        except (WebSocketException, OSError) as error:
            raise ClusterUnreachable(f"the connection to {self._what} broke", str(error)) from error
        for channel in (STDOUT, STDERR):
            if data := self._websocket.read_channel(channel):
                yield channel, data
        self._status += self._websocket.read_channel(STATUS) or b""

    def write(self, data: bytes) -> None:
        """Give it something to read."""
        self._websocket.write_channel(STDIN, data)

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
    def is_open(self) -> bool:
        """Whether it may still say something."""
        return bool(self._websocket.is_open())

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
