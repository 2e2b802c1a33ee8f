"""`python -m trainyard_trainer.on_ray.warm.server --idle-s S --cpus N`: the warm process.

It has one thread, and runs no code of the user. For each run it forks two processes, and hands the two
sockets that lead to them to the command that has asked. Those of the next run are always prepared: their
driver has started a Ray. They are prepared after a run has ended, so that no run shares its CPUs with this.

It ends after S seconds without a run, at SIGTERM, or if a command asks for it. Runs that go on are not
disturbed: they are no longer its own.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainyard_trainer.on_ray.local_ray import forkable, forked_workers, ray_environment
from trainyard_trainer.on_ray.warm.run_processes import RunProcesses, Work, fork_run_processes
from trainyard_trainer.run_files.programs.start import python_path
from trainyard_trainer.run_files.warm import messages
from trainyard_trainer.run_files.warm.facts import Facts, facts

MODULES = (*forked_workers.MODULES, "trainyard_trainer.program")
"""What the warm process imports: what workers import, and the program of the driver."""

INIT = 1
"""A process that does not end. Ray's workers end with the process whose id was known when Ray was imported.
These end with their driver: the kernel ends them with the fork server, their parent."""

END_S = 20.0
"""Seconds within which the prepared driver ends its Ray."""

END_LOOK_S = 0.05
"""Seconds between two looks whether it has ended."""


class WarmServer:
    """Answers commands, and keeps the processes of the next run prepared."""

    def __init__(
        self,
        listener: socket.socket,
        lock: BinaryIO,
        own: Facts,
        loaded: dict[str, str],
        *,
        idle_s: float,
        cpus: int,
    ) -> None:
        self._listener = listener
        self._lock = lock
        self._facts = own
        self._loaded = loaded
        self._base_path = [folder for folder in sys.path if folder not in python_path()]
        self._idle_s = idle_s
        self._cpus = cpus
        self._prepared: RunProcesses | None = None
        self._is_ready = False
        self._running: set[int] = set()
        self._num_runs = 0
        self._since = time.time()
        self._unused_since = time.monotonic()
        self._has_ended = False
        self._asked: socket.socket | None = None
        self._woken, self._wakes = socket.socketpair()

    def serve(self) -> Work | None:
        """Serve until the end; return what to do in each forked process, and None in this one."""
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        work = self._prepare()
        while work is None and not self._has_ended:
            waited = (self._listener, self._woken, *self._unread())
            readable, _, _ = select.select(waited, [], [], self._left_s())
            if self._woken in readable:
                self._woken.recv(4096)
                work = self._reap()
            elif self._listener in readable:
                work = self._answer()
            elif readable:
                self._note_ready()
            elif self._left_s() == 0:
                print(f"unused for {self._idle_s:g} s: ends", flush=True)
                break
        if work is None:
            Path(self._listener.getsockname()).unlink(missing_ok=True)
            self._listener.close()
            self._end_prepared()
        return work

    def _end(self, number: int, frame: object) -> None:
        self._has_ended = True

    def _left_s(self) -> float | None:
        """Return the seconds until this process ends; None while a run goes on or a Ray starts."""
        if self._running or self._unread():
            return None
        return max(self._unused_since + self._idle_s - time.monotonic(), 0.0)

    def _unread(self) -> list[socket.socket]:
        """Return the socket on which the prepared driver will tell that it is ready."""
        return [self._prepared.request] if self._prepared and not self._is_ready else []

    def _note_ready(self) -> None:
        assert self._prepared is not None
        self._is_ready = self._prepared.request.recv(1) == messages.READY
        self._unused_since = time.monotonic()
        if not self._is_ready:
            print("the prepared driver has ended", flush=True)
            self._forget_prepared()

    def _prepare(self) -> Work | None:
        """Fork the processes of the next run. Return in them, with what they are to do."""
        cause = forkable.cause_not_to_fork()
        if cause is not None:
            print(cause, flush=True)
            self._has_ended = True
            return None
        own = (self._listener, self._lock, self._woken, self._wakes)
        forked = fork_run_processes(self._cpus, self._loaded, self._base_path, own)
        if not isinstance(forked, RunProcesses):
            return forked
        self._prepared, self._is_ready = forked, False
        return None

    def _reap(self) -> Work | None:
        """Note which runs have ended, and prepare the next one after a run."""
        has_run = False
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid in self._running:
                    self._running.remove(pid)
                    self._unused_since = time.monotonic()
                    has_run = True
                elif self._prepared is not None and pid == self._prepared.pid:
                    print("the prepared processes have ended", flush=True)
                    self._forget_prepared()
        return self._prepare() if has_run and self._prepared is None else None

    def _forget_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
        self._prepared, self._is_ready = None, False

    def _answer(self) -> Work | None:
        """Greet a command, and do what it asks for."""
        connection, _ = self._listener.accept()
        with connection, suppress(OSError, EOFError, ValueError, messages.WarmFolderError):
            connection.settimeout(messages.ANSWER_S)
            messages.require_own_peer(connection)
            messages.send(connection, {"facts": self._facts, "state": self._state()})
            wanted, _ = messages.receive(connection)
            if wanted.get("command") == messages.DOWN:
                self._has_ended = True
                self._asked = connection.dup()  # is at its end when this process is
            elif wanted.get("command") == messages.RUN:
                return self._hand_over(connection, int(wanted["cpus"]))
        return None

    def _state(self) -> Mapping[str, Any]:
        left_s = self._left_s()
        return {
            "pid": os.getpid(),
            "since": self._since,
            "cpus": self._cpus,
            "is_ready": self._is_ready,
            "is_prepared": self._prepared is not None,
            "runs": self._num_runs,
            "running": len(self._running),
            "left_s": left_s,
        }

    def _hand_over(self, connection: socket.socket, cpus: int) -> Work | None:
        """Hand the prepared processes to a command; if none fit, they are made now."""
        if self._prepared is not None and self._prepared.cpus != cpus:
            self._forget_prepared()  # its driver ends
        self._cpus = cpus
        if self._prepared is None and (work := self._prepare()) is not None:
            return work
        if self._prepared is None:
            return None
        run = self._prepared
        messages.send(connection, {}, [run.request.fileno(), run.status.fileno()])
        self._running.add(run.pid)
        self._num_runs += 1
        self._forget_prepared()
        return None

    def _end_prepared(self) -> None:
        """End the prepared processes, and wait until their Ray has ended."""
        if self._prepared is None:
            return
        pid = self._prepared.pid
        self._forget_prepared()
        deadline = time.monotonic() + END_S
        with suppress(ChildProcessError):
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                time.sleep(END_LOOK_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainyard_trainer.on_ray.warm.server")
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--cpus", type=int, required=True)
    wanted = parser.parse_args()
    folder = messages.folder_path()
    lock = _locked(folder)
    own = facts()
    loaded = _load()
    if (cause := forkable.cause_not_to_fork() or forkable.cause_by_trial()) is not None:
        sys.exit(f"error: this process cannot be forked: {cause}")
    forkable.keep_memory_shared()
    listener = _listening(messages.address(folder))
    server = WarmServer(listener, lock, own, loaded, idle_s=wanted.idle_s, cpus=wanted.cpus)
    work = server.serve()
    if work is not None:
        work()


def _load() -> dict[str, str]:
    """Import what a run imports; return the environment with which this was done."""
    os.environ["RAY_JOB_ID"] = forked_workers.FIRST_JOB
    os.environ["RAY_RAYLET_PID"] = str(INIT)
    ray_environment.set_defaults()
    ray_environment.set_local_defaults("forked")
    loaded = forkable.load(MODULES)
    os.environ.clear()
    os.environ.update(loaded)
    return loaded


def _locked(folder: Path) -> BinaryIO:
    """Create the folder and hold its lock, which the kernel gives back when this process ends."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        messages.require_own(folder)
    except messages.WarmFolderError as error:
        sys.exit(f"error: {error}")
    lock = (folder / messages.LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: another warm process has the folder {folder}")
    return lock


def _listening(address: str) -> socket.socket:
    """Return the listening socket. The file of a warm process that was killed is replaced."""
    Path(address).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    return listener


if __name__ == "__main__":
    main()
