"""The queue of the runs on a standing RayCluster: first come, first served.

The drivers of all its runs are processes of one head pod. Each takes the next number, and keeps a file of
that number locked for as long as its run needs its places. The kernel releases the lock when the process
ends, whatever ends it, so no place is lost with a driver.

A run starts once its workers fit beside those of all runs before it. So a large run is not overtaken for ever
by smaller ones that come later.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainyard_trainer.run_files.driver_output import WAITING, record_line

FOLDER = Path("/tmp/trainyard-places")
"""The folder of the queue on the head. It is as old as the head's pod, as are all drivers in it."""

LOCK = "lock"
"""The file whose lock protects the numbers."""

POLL_S = 0.2
"""Seconds between two looks at the queue."""

SAY_S = 10.0
"""Seconds after which an unchanged place is told again: launchers read only the end of the head's log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A run in the queue."""

    run: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run stands in the queue."""

    position: int
    """How many runs must end or start before it; 0 if it may start."""
    workers: int
    places: int
    """The number of workers for which the cluster has places, used and free ones."""
    behind: Sequence[str]
    """The names of the runs before it, those that train first."""


def standing(ticket: Ticket, before: Sequence[Ticket], places: int) -> Standing:
    """Return where a run stands whose queue has the runs `before` it, in the order of their numbers."""
    taken, waiting = 0, 0
    for each in before:
        # A run that waits keeps back those after it.
        waiting += waiting > 0 or taken + each.workers > places
        taken += each.workers
    is_free = taken + ticket.workers <= places
    return Standing(
        position=0 if is_free else waiting + 1,
        workers=ticket.workers,
        places=places,
        behind=() if is_free else tuple(each.run for each in before),
    )


@contextmanager
def places_taken(
    ticket: Ticket, count_places: Callable[[], int], folder: Path = FOLDER
) -> Iterator[None]:
    """Wait until a run has its places, and keep them inside the block; say where it stands meanwhile.

    `count_places` returns for how many workers the cluster has places now.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _numbered(ticket, folder) as number:
        said, said_at = None, 0.0
        while True:
            found = standing(ticket, _before(number, folder), count_places())
            is_news = found != said or time.monotonic() - said_at > SAY_S
            if is_news and (said is not None or found.position):
                print(record_line(WAITING, asdict(found)), flush=True)
                said, said_at = found, time.monotonic()
            if not found.position:
                break
            time.sleep(POLL_S)
        yield


@contextmanager
def _numbered(ticket: Ticket, folder: Path) -> Iterator[int]:
    """Take the next number; give it back at the end of the block."""
    with _lock(folder):
        number = max((number for number, _ in _files(folder)), default=0) + 1
        path = folder / f"{number}.json"
        file = path.open("x")
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(ticket), file)
        file.flush()
    try:
        with file:
            yield number
    finally:
        path.unlink(missing_ok=True)


def _before(number: int, folder: Path) -> list[Ticket]:
    """Return the runs with smaller numbers whose drivers are alive."""
    with _lock(folder):
        return [
            Ticket(**json.loads(path.read_text()))
            for other, path in _files(folder)
            if other < number and not _is_abandoned(path)
        ]


def _is_abandoned(path: Path) -> bool:
    """Return whether no process keeps a file locked; such a file is deleted."""
    with suppress(BlockingIOError), path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the numbers that are in use, with their files, in their order."""
    return sorted((int(path.stem), path) for path in folder.glob("*.json"))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let no other driver change the queue inside the block."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
