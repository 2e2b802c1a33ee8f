"""Termination of the driver's pod: the preStop hook lets the driver save a checkpoint and release its lease.

Otherwise the head would end before the workers have saved, and the next attempt would have to wait until
the lease of this one expires. The hook touches the file in TRAINYARD_LEAVING and waits for an exclusive
lock on it (flock). Each driver holds a shared lock on the file while it holds a lease. A pod without a
running driver terminates immediately.

A driver that has released its lease keeps running: if it exited, KubeRay would count a failed attempt.
"""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainyard_trainer.run_folder.stop_signals import Leaving, fail_on_sigusr1

VARIABLE = "TRAINYARD_LEAVING"
"""The environment variable with the path of the file that the preStop hook touches."""

POLL_S = 0.2
"""The interval in seconds at which the file is checked."""


@contextmanager
def heeded(path: str | None) -> Iterator[None]:
    """Raise Leaving in the main thread when the preStop hook runs. Never return if Leaving ends the block."""
    if path is None:
        yield
        return
    fail_on_sigusr1()
    # The file exists already if the container was restarted within its pod.
    with Path(path).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            with _watched(Path(path)):
                yield
        except Leaving:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # replaces the handler of Ray
            fcntl.flock(file, fcntl.LOCK_UN)
            while True:  # until the pod's termination kills this process
                signal.pause()


@contextmanager
def _watched(path: Path) -> Iterator[None]:
    """Send SIGUSR1 to the calling thread when the file is touched."""
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
