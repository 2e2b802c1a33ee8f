"""This terminal, connected to a command in a pod."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any, Protocol

STDOUT = 1
POLL_S = 0.2
"""Between two looks at a connection that may hold what its socket no longer does."""


class InteractiveProcess(Protocol):
    """A command in a pod."""

    @property
    def is_open(self) -> bool: ...
    @property
    def exit_code(self) -> int: ...
    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]: ...
    def write(self, data: bytes) -> None: ...
    def end_input(self) -> None: ...
    def resize(self, columns: int, rows: int) -> None: ...
    def fileno(self) -> int: ...


def is_one() -> bool:
    """Whether there is somebody at a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def connect(process: InteractiveProcess, *, is_raw: bool) -> int:
    """Pass on what is typed and what is answered until the command ends; its exit code."""
    with _raw(process) if is_raw else contextlib.nullcontext():
        inputs: list[Any] = [process, sys.stdin.fileno()]
        while process.is_open:
            ready, _, _ = select.select(inputs, [], [], POLL_S)
            if sys.stdin.fileno() in ready:
                if data := os.read(sys.stdin.fileno(), 4096):
                    process.write(data)
                else:
                    process.end_input()
                    inputs.remove(sys.stdin.fileno())
            _show(process)
        _show(process)
    return process.exit_code


def _show(process: InteractiveProcess) -> None:
    for channel, data in process.read(0):
        stream = sys.stdout if channel == STDOUT else sys.stderr
        stream.buffer.write(data)
        stream.flush()


@contextlib.contextmanager
def _raw(process: InteractiveProcess) -> Iterator[None]:
    """Every key goes there, Ctrl-C too; it learns the size of this terminal whenever that changes."""
    before = termios.tcgetattr(sys.stdin)

    def resize(*_: object) -> None:
        process.resize(*shutil.get_terminal_size())

    handler = signal.signal(signal.SIGWINCH, resize)
    tty.setraw(sys.stdin)
    try:
        resize()
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)
