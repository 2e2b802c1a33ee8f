"""A debugger of a worker: the standard library's pdb, for a terminal that connects while the worker trains.

`trainyard_trainer.tools.attach` is the other end of the connection.
"""

from __future__ import annotations

import faulthandler
import inspect
import io
import os
import pdb
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from types import FunctionType, MethodType
from typing import Any

import torch

from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.parallel.activity import Activity
from trainyard_trainer.run_files.unix_sockets import debugger_socket, peer_of

STACKS_S = 10.0
"""Seconds without a further step after which a terminal is shown where the worker is."""

GREETING = (
    "The next step stops at the first line of {entry}. The other workers wait for this one, but start again "
    "from a checkpoint if that takes {limit_s:g} s (faults.collective_timeout_s). `c` goes on to the next "
    "breakpoint; `q` or Ctrl-D leaves the worker to train on.\n"
)

LOOK_S = 0.1
"""Seconds between two looks whether a terminal that waits for a step is still there."""

BUSY = "error: another terminal debugs this worker\n"

LEFT = "The worker trains on.\n"


class Debugger:
    """Waits for terminals, one after the other, and lets each debug this process from the next step on."""

    def __init__(self, entry: Callable[..., Any], limit_s: float, activity: Activity) -> None:
        """The debugger stops at `entry`. The other workers wait for this one for `limit_s` seconds.

        `activity` is told that the worker is debugged, so that it does not count as hanging.
        """
        self._activity = activity
        self._entry = entry
        self._limit_s = limit_s
        self._client: socket.socket | None = None
        """The terminal that is connected."""
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._is_begun, self._is_over = threading.Event(), threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take terminals inside the block."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(debugger_socket(os.getpid()))
            listener.listen()
            thread = threading.Thread(
                target=self._take_terminals, args=(listener,), name="debugger", daemon=True
            )
            thread.start()
            try:
                yield
            finally:
                self._is_over.set()
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
                thread.join()
                if self._session is not None:
                    self._session.leave()
                self._leave()

    def stop_if_asked(self) -> None:
        """Begin the session of a terminal that has connected; end that of one that has left.

        Called by the thread that trains, between two steps.
        """
        if self._session is not None:
            if has_left(self._session.connection):
                self._session.leave()
            if self._session.is_ended:
                self._session = None
                self._activity.is_debugged = False
                self._leave()
        elif self._client is not None:
            with self._lock:
                self._session = Session(self._client) if self._client is not None else None
                self._is_begun.set()
            if self._session is not None:
                self._activity.is_debugged = True
                self._session.begin(self._entry)

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _take_terminals(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # it was shut down
                return
            with suppress(OSError):  # the terminal has left
                self._take(client)

    def _take(self, client: socket.socket) -> None:
        """Hand a terminal to the thread that trains; if that makes no step, show where it is."""
        _, user = peer_of(client)
        if user != os.getuid() or self._client is not None:
            client.sendall(BUSY.encode())
            client.close()
            return
        greeting = GREETING.format(entry=self._entry.__qualname__, limit_s=self._limit_s)
        client.sendall(greeting.encode())
        self._is_begun.clear()
        self._client = client
        self._await_step(client, time.monotonic() + STACKS_S)

    def _await_step(self, client: socket.socket, deadline: float) -> None:
        """Wait until the session of a terminal has begun; after the deadline, show where the worker is."""
        is_shown = False
        while not self._is_begun.wait(LOOK_S) and not self._is_over.is_set():
            with (
                self._lock
            ):  # once the session has begun, the thread that trains may close the connection
                if not self._is_begun.is_set() and has_left(client):
                    self._leave()
                    return
            if not is_shown and time.monotonic() >= deadline:
                is_shown = True
                client.sendall(f"No step has begun for {STACKS_S:g} s. All threads:\n".encode())
                client.sendall(stacks())


def stacks() -> bytes:
    """Return the stacks of all threads of this process, for people."""
    # No other thread runs while they are written, so that they are not written to a terminal.
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def has_left(connection: socket.socket) -> bool:
    """Return whether the terminal has closed its end of the connection, and all that it sent is read."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


class Session(pdb.Pdb):
    """A pdb whose terminal is a connection. It never ends the worker: when it ends, the worker trains on."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_ended = False
        terminal: Any = Terminal(connection)
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False)

    def begin(self, entry: Callable[..., Any]) -> None:
        """Stop at the first line of a function when it is called next; if it has none, at the next line."""
        self.reset()
        frame = sys._getframe().f_back
        while frame is not None:
            frame.f_trace = self.trace_dispatch
            self.botframe = frame
            frame = frame.f_back
        if self._stops_at(inspect.unwrap(entry)):
            super().set_continue()
        else:
            self.set_step()
        sys.settrace(self.trace_dispatch)

    def _stops_at(self, entry: Callable[..., Any]) -> bool:
        """Set a breakpoint at the first line of a function. Return False if that is not possible."""
        if not isinstance(entry, MethodType | FunctionType):
            return False
        code = entry.__code__
        lines = [line for *_, line in code.co_lines() if line and line > code.co_firstlineno]
        return bool(lines) and not self.set_break(code.co_filename, min(lines), temporary=True)

    def leave(self) -> None:
        """End the session: the worker trains on at full speed."""
        self.clear_all_breaks()
        self.set_continue()

    def set_continue(self) -> None:
        """Go on to the next breakpoint; without one, the session ends."""
        super().set_continue()
        if not self.breaks and not self.is_ended:
            self.is_ended = True
            self.stdout.write(LEFT)
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def do_quit(self, arg: str) -> bool:
        """Leave the worker: it trains on."""
        self.leave()
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815 - pdb's name for the end of its input

    def do_run(self, arg: str) -> None:
        """Refuse to start the program again."""
        self.error("a worker cannot be started again from here")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """Refuse a Python prompt, which would read from the worker's own standard input."""
        self.error("there is no Python prompt here; `!STATEMENT` runs a statement")


class Terminal(io.TextIOBase):
    """The lines from and for a terminal, which may have left."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Return the next line; empty if the terminal has left. What follows the line stays unread."""
        line = b""
        with suppress(OSError):
            while not line.endswith(b"\n") and (piece := self._connection.recv(1)):
                line += piece
        return line.decode(errors="replace")

    def write(self, output: str, /) -> int:
        with suppress(OSError):
            self._connection.sendall(output.encode())
        return len(output)


class DebuggedBatches:
    """Batches between which a debugger may stop the worker."""

    def __init__(self, batches: Batches, debugger: Debugger) -> None:
        self._batches = batches
        self._debugger = debugger

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for batch in self._batches.epoch(epoch):
            self._debugger.stop_if_asked()
            yield batch

    def state(self) -> dict[str, torch.Tensor]:
        return self._batches.state()
