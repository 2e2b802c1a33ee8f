"""How long a worker waits for the others, in the collective operations of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard_trainer.parallel.activity import WAITING, Activity


class Waits:
    """The seconds that a worker has spent in blocks of code that wait for other workers.

    On a GPU the host does not wait where its device does, so the time is taken on the device.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        """What the worker is doing now, such as waiting."""
        self._seconds = 0.0
        self._is_counting = False
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Count the time of a block of code. A block within a block counts once."""
        if self._is_counting:
            yield
            return
        self._is_counting = True
        try:
            timed = self._timed_on_device() if device.type == "cuda" else self._timed()
            with timed, self.activity.on(WAITING):
                yield
        finally:
            self._is_counting = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    @contextmanager
    def _timed_on_device(self) -> Iterator[None]:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._on_device.append((before, after))

    def seconds(self) -> float:
        """Return the seconds so far, without blocks that a GPU has not finished yet. Does not wait for it."""
        while self._on_device and self._on_device[0][1].query():
            before, after = self._on_device.pop(0)
            self._seconds += before.elapsed_time(after) / 1000
        return self._seconds
