"""The driver's side of forked worker processes: start the fork server, and say when there is none.

This module does not import Ray: the fork server is started first, and imports PyTorch while the driver
imports Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import site
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Protocol

from trainyard_trainer.environment import change_runtime_env, job_config
from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray.local_ray import ray_environment
from trainyard_trainer.on_ray.local_ray.fork_client import ADDRESS_VARIABLE, MARK_VARIABLE
from trainyard_trainer.on_ray.local_ray.fork_request import own_flags
from trainyard_trainer.on_ray.local_ray.fork_server import READY, TAKEN
from trainyard_trainer.on_ray.local_ray.forkable import LIBRARIES, RAY_MODULES
from trainyard_trainer.on_ray.local_ray.mode import local_ray_mode
from trainyard_trainer.run_files.programs.start import PACKAGES, has_installed_packages
from trainyard_trainer.run_files.warm.load_variables import NOT_COMPARED, READ_AT_LOAD

CLIENT = str(Path(__file__).with_name("fork_client.py"))
"""The program that the raylet starts in place of a worker."""

SERVER = str(Path(__file__).with_name("fork_server.py"))

MODULES = (*LIBRARIES, *RAY_MODULES)
"""What the fork server imports."""

FIRST_JOB = "01000000"
"""The id of the first job of a new Ray."""

READY_S = 60.0
"""Seconds within which the fork server must have imported its modules."""


class ForkServing(Protocol):
    """A fork server, as its driver knows it."""

    address: str

    def cause_of_absence(self) -> str | None: ...

    def refusals(self) -> Iterator[str]: ...

    def end(self) -> None: ...


_server: ForkServing | None = None
"""The fork server of this driver."""


class ForkingProcess:
    """A process from which others are forked, asked through a socket; the kernel ends it with this one."""

    def __init__(
        self, program: str, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        """Start a program with the ids of this process, of the socket and of a pipe, and with arguments."""
        self.address = f"trainyard-{os.getpid()}-{secrets.token_hex(8)}"
        status, told = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            # A name in Linux' abstract namespace: there is no file that could stay.
            listener.bind("\0" + self.address)
            listener.listen(128)
            descriptors = (listener.fileno(), told)
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *own_flags(), program),
                    *(str(os.getpid()), *map(str, descriptors), self.address, *arguments),
                ],
                # Ray ends a worker when the process of this id ends. This one lasts as long as its raylet.
                env={**variables, "RAY_RAYLET_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        os.close(told)
        self.status = os.fdopen(status, encoding="utf-8")

    def refusals(self) -> Iterator[str]:
        """Yield why a worker was not forked, for each such worker, until the process ends."""
        yield from map(str.rstrip, self.status)

    def end(self) -> None:
        """End the process, and with it those that it has forked."""
        self.process.kill()
        self.process.wait()


class ForkServerProcess(ForkingProcess):
    """The process that forks Ray's workers."""

    def __init__(self) -> None:
        super().__init__(SERVER, MODULES, server_environment())

    def cause_of_absence(self) -> str | None:
        """Wait until the server has imported its modules; return why it cannot be used, or None."""
        if not select.select([self.status], [], [], READY_S)[0]:
            self.end()
            return f"the process that forks them was not ready within {READY_S:g} s"
        answer = self.status.readline().rstrip()
        if not answer:
            return f"the process that forks them has failed: exit code {self.process.wait()}"
        return None if answer == READY else answer


def server_environment() -> dict[str, str]:
    """Return the variables with which the fork server imports its modules: those of the workers."""
    return os.environ | {
        "PYTHONPATH": import_path(),
        "RAY_JOB_ID": FIRST_JOB,
    }


def import_path() -> str:
    """Return the PYTHONPATH of Ray's processes.

    They must not import modules from the user's entries of PYTHONPATH, but must find this package even if it
    is not installed.
    """
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [*filter(has_installed_packages, before)]
    if PACKAGES not in (*site.getsitepackages(), site.getusersitepackages()):
        paths.append(PACKAGES)
    return os.pathsep.join(paths)


def start(variables: Mapping[str, str], *, use_gpu: bool) -> None:
    """Start the fork server of a run with these variables, unless workers cannot be forked here."""
    global _server
    mode = local_ray_mode(use_gpu=use_gpu)
    if mode != "forked" or _server is not None:
        return
    if sys.platform != "linux":
        say_why(f"this needs Linux, and this is {sys.platform}")
    elif early := [*filter(READ_AT_LOAD.fullmatch, {*variables} - NOT_COMPARED)]:
        say_why(f"a library reads {early[0]} of `env` when it is loaded")
    elif ray_environment.existing_cluster():
        mark_workers()
    else:
        ray_environment.set_defaults()
        ray_environment.set_local_defaults(mode)
        _server = ForkServerProcess()


def mark_workers() -> None:
    """Let the workers of this job be forked in the pods that can do so."""
    runtime_env = job_config().get("runtime_env") or {}
    variables = runtime_env.get("env_vars") or {}
    change_runtime_env(os.environ, env_vars={**variables, MARK_VARIABLE: "1"})


def use(server: ForkServing) -> None:
    """Use a fork server that was started before this driver."""
    global _server
    _server = server


@contextmanager
def forking() -> Iterator[str | None]:
    """Yield the program that the raylet is to start in place of a worker; None without a fork server.

    The fork server is ended after the block.
    """
    global _server
    if _server is None:
        yield None
        return
    os.environ[ADDRESS_VARIABLE] = _server.address
    try:
        yield CLIENT
    finally:
        os.environ.pop(ADDRESS_VARIABLE, None)
        _server.end()
        _server = None


def tell_environment(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Tell the fork server the environment that workers are to have from now on.

    `before` is the one with which Ray was started. Raises RunError.
    """
    assert _server is not None
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + _server.address)
        message = json.dumps({"before": dict(before), "now": dict(now)}).encode()
        server.sendall(struct.pack("I", len(message)) + message)
        if server.recv(1) != TAKEN:
            raise RunError("the process that forks the workers has not taken their environment")


def announce() -> None:
    """Print why workers are not forked, if the fork server that was started cannot be used.

    Otherwise a thread prints why single workers are not forked, each cause once.
    """
    if _server is None:
        return
    if (cause := _server.cause_of_absence()) is not None:
        say_why(cause)
        return
    refusals = _server.refusals()
    Thread(target=print_refusals, args=(refusals,), name="fork-refusals", daemon=True).start()


def print_refusals(refusals: Iterable[str]) -> None:
    """Print why workers are not forked, each cause once, until there are no more."""
    seen: set[str] = set()
    for cause in refusals:
        if cause not in seen:
            seen.add(cause)
            print(f"a worker process is not forked: {cause}", flush=True)


def say_why(cause: str) -> None:
    """Print that the workers start without the fork server, which takes longer."""
    print(f"worker processes are not forked: {cause}", flush=True)
