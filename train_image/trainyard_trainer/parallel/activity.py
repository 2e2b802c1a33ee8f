"""What a worker is doing now, for another thread of its process that wants to know whether it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAITING = "communication"
"""The phase of a worker that exchanges data with the other workers, and so may wait for one of them."""


class Activity:
    """The phase in which the thread is that trains: one of TIME_PHASES.

    In a pass of a sharded model a worker is in `communication`, and so is one with DDP in a backward pass.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        """The thread that trains: the one that creates this object."""
        self.is_debugged = False
        """Whether a person has stopped the thread in a debugger."""
        self._now = ("startup", time.monotonic())

    @contextmanager
    def on(self, phase: str) -> Iterator[None]:
        """Be in a phase during a block of code."""
        before, _ = self._now
        self._now = (phase, time.monotonic())
        try:
            yield
        finally:
            self._now = (before, time.monotonic())

    def now(self) -> tuple[str, float]:
        """Return the phase, and the seconds since it began. Any thread may call it."""
        phase, began = self._now
        return phase, time.monotonic() - began
