"""Connect to the warm process of this user, and read how it stands."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from trainyard.errors import RunFailed
from trainyard_trainer.run_files.warm import messages
from trainyard_trainer.run_files.warm.facts import Facts, difference, facts


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmState:
    """How a warm process stands."""

    pid: int
    since: float
    """time.time() at its start."""
    cpus: int
    """The CPUs of its Ray."""
    is_prepared: bool
    """Whether it has a Ray for the next run, which may still start."""
    is_ready: bool
    """Whether this Ray has started."""
    runs: int
    """The number of runs that have begun in it."""
    running: int
    """The number of runs that go on."""
    left_s: float | None
    """The seconds until it ends if no run begins; None while a run goes on or its Ray starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Greeting:
    """What a warm process says to each command."""

    connection: socket.socket
    state: WarmState
    facts: Facts

    def difference(self, environment: Mapping[str, str]) -> str | None:
        """Return what is not the same here and in the warm process, or None."""
        return difference(self.facts, facts(environment))


@contextmanager
def greeted() -> Iterator[Greeting | None]:
    """Yield the greeting of this user's warm process; None without one. The connection is closed at the end.

    Raises RunFailed if there is one that does not answer, or that cannot be trusted.
    """
    if sys.platform != "linux":
        yield None
        return
    folder = messages.folder_path()
    try:
        connection = messages.connect(folder)
        if connection is None:
            yield None
            return
    except messages.WarmFolderError as error:
        raise RunFailed(f"the warm process is not used: {error}") from None
    with connection:
        yield _read(connection)


def _read(connection: socket.socket) -> Greeting:
    try:
        answer, _ = messages.receive(connection)
        state = WarmState(**answer["state"])
        return Greeting(connection=connection, state=state, facts=answer["facts"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(
            f"the warm process does not answer: {type(error).__name__} {error}",
            f"End it with `kill -9 {messages.require_own_peer(connection)}`, and start another.",
        ) from None
