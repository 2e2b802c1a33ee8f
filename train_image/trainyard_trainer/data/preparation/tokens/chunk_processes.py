"""Make the chunks of a large source in several processes, since tokenising needs more than one core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Generic, TypeVar

from trainyard_trainer.child_process import end_with_parent
from trainyard_trainer.hardware import usable_cpus

Result = TypeVar("Result")

MADE_HERE = 8
"""The number of chunks that this process makes before it starts others: an import of the tokenizer takes
seconds in each of them, and a few hundred MB."""

MOST_PROCESSES = 8
"""The largest number of processes by default: one that reads and writes cannot keep more of them busy."""


class ChunkProcesses(Generic[Result]):
    """Calls a function with the arguments of each chunk: here at first, and in other processes later.

    The function and its results must be picklable. Its processes end with this one, even if that is killed.
    """

    def __init__(self, make: Callable[..., Result], processes: int | None) -> None:
        """`processes` is the number of other processes; None for one per CPU, up to `MOST_PROCESSES`."""
        self._make = make
        self._processes = processes or min(usable_cpus(), MOST_PROCESSES)
        self._count = 0
        self._pool: ProcessPoolExecutor | None = None

    @property
    def ahead(self) -> int:
        """How many chunks may be under way, so that no process waits for the next."""
        return 2 * self._processes if self._pool else 0

    def submit(self, *arguments: Any) -> Future[Result]:
        """Make a chunk; in this process it is finished when the method returns. Raises what `make` raises."""
        self._count += 1
        if self._count <= MADE_HERE or self._processes == 1:
            made: Future[Result] = Future()
            made.set_result(self._make(*arguments))
            return made
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                # A fork of a process with threads, such as those of the tokenizer, may hang.
                multiprocessing.get_context("forkserver"),
                initializer=_begin,
                initargs=(self._make,),
            )
        return self._pool.submit(_made, *arguments)

    def end(self) -> None:
        """End the processes. Chunks that are not made yet are given up."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


# In the other processes.

_make: Callable[..., Any]
"""The function that makes a chunk."""


def _begin(make: Callable[..., Any]) -> None:
    """Keep the function, and end when the process that has started this one ends."""
    global _make
    _make = make
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    end_with_parent()


def _made(*arguments: Any) -> Any:
    return _make(*arguments)
