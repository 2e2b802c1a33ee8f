"""The signals that stop a process of a run, and the errors that they raise in its main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.driver_output import BY_SIGNAL


class StoppedBySignal(RunError):
    """The process got SIGTERM: the run stops, and resumes when it is started again."""

    notice = "SIGTERM"
    """What happened, as the output names it."""

    def __init__(self) -> None:
        super().__init__(f"{BY_SIGNAL}; started again, it goes on from there")


class Leaving(StoppedBySignal):
    """The pod of this process is being deleted: the run resumes in another pod."""

    notice = "this pod goes away"

    def __init__(self) -> None:
        RunError.__init__(self, "this pod goes away: the run is given back, and goes on in another")


_deferred: list[StoppedBySignal] | None = None
"""The errors of signals that came in the block of `deferred`; None outside of one."""


def fail_on_sigterm() -> None:
    """Raise StoppedBySignal in the main thread at the first SIGTERM."""
    signal.signal(signal.SIGTERM, _leave)


def fail_on_sigusr1() -> None:
    """Raise Leaving in the main thread at SIGUSR1, which `trainyard_trainer.on_ray.leaving` sends."""
    signal.signal(signal.SIGUSR1, _leave)


def is_sigterm_handled() -> bool:
    """Return whether this module handles SIGTERM."""
    return signal.getsignal(signal.SIGTERM) in (_leave, _ignore)


@contextmanager
def deferred() -> Iterator[None]:
    """Raise the error of a signal that comes in this block only at its end.

    It is for blocks in which Python forks: it calls functions before and after, some of which hold locks, and
    an exception in one of them is lost, together with the lock.
    """
    global _deferred
    came: list[StoppedBySignal] = []
    _deferred = came
    try:
        yield
    finally:
        _deferred = None
        if came:
            raise came[0]


def _leave(signum: int, frame: object) -> None:
    """Raise the error of the first signal; ignore all further ones, which would disturb the shutdown."""
    # Programs that are started from now on would inherit SIG_IGN, but not a function.
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGUSR1, _ignore)
    error = Leaving() if signum == signal.SIGUSR1 else StoppedBySignal()
    if _deferred is None:
        raise error
    _deferred.append(error)


def _ignore(signum: int, frame: object) -> None:
    """Do nothing at a signal."""
