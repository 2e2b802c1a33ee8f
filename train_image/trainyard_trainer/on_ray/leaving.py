"""A pod that is about to go: its preStop hook has the drivers in it save, and give their runs back.

Without that a head would be gone before the workers have saved, and the next attempt would have to wait for
signs of life of this one. The hook touches the file that TRAINYARD_LEAVING names, and waits for an exclusive
lock on it (flock); each driver holds a shared one for as long as it holds a run. A pod without a driver, or
with one that has died, goes at once.

A driver that has given its run back does not end: the job would be taken for failed, and an attempt be spent.
"""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainyard_trainer.run_folder.attempt_scope import Leaving, fail_on_sigusr1

VARIABLE = "TRAINYARD_LEAVING"

POLL_S = 0.2


@contextmanager
def heeded(path: str | None) -> Iterator[None]:
    """The main thread gets Leaving once the hook asks; where it leaves the block so, it never returns."""
    if path is None:
        yield
        return
    fail_on_sigusr1()
    # A container that starts anew in its pod may find the file there.
    with Path(path).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            with _watched(Path(path)):
                yield
        except Leaving:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set its own handler
            fcntl.flock(file, fcntl.LOCK_UN)
            while True:  # until this process is killed, with its pod
                signal.pause()


@contextmanager
def _watched(path: Path) -> Iterator[None]:
    """This thread gets SIGUSR1 once the file is touched."""
    before, this_thread, ended = path.stat().st_mtime_ns, threading.get_ident(), threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            if path.stat().st_mtime_ns != before:
                signal.pthread_kill(this_thread, signal.SIGUSR1)
                return

    thread = threading.Thread(target=watch, name="leaving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
