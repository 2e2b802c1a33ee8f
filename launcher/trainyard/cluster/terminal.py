"""Connect this terminal to a command in a pod."""

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
"""Seconds between two reads of a connection whose TLS buffer may hold output that `select` cannot see."""


class InteractiveProcess(Protocol):
    """The methods of `PodProcess` that an interactive session needs."""

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
    """Return whether standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def connect(process: InteractiveProcess, *, is_raw: bool) -> int:
    """Pass input and output on until the command ends, and return its exit code."""
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
    """Put the terminal into raw mode, so that Ctrl-C reaches the command, and pass size changes on."""
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
