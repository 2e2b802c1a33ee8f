"""The settings of a preparation that do not change its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MEMORY_BYTES = 256 * 2**20
"""The largest source without random access that is read into memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareContext:
    """The settings of a preparation that do not change its result."""

    endpoint: str | None = None
    """The address of the sources' S3 server; None for AWS."""
    threads: int = 1
    """The number of threads that read and decode images."""
    processes: int | None = None
    """The largest number of processes that tokenise; None for one per CPU, up to `MOST_PROCESSES`."""
    max_bad_samples: int = 0
    owns_destination: bool = False
    """Whether nothing else can have written to the destination, as in the folder of a run. An interrupted
    preparation is then replaced if its options have changed."""
    memory_bytes: int = MEMORY_BYTES
    say: Callable[[str], None] = print
    show: Callable[[str, int, int], None] = lambda stage, done, total: None
    """Is called with the stage, the number of finished samples and their total number."""
