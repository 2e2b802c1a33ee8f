"""The processes of a run: a fork server, which is a child of the warm process, and the driver, its child."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from trainyard_trainer.on_ray.local_ray import fork_server, forked_child
from trainyard_trainer.on_ray.warm import driver

Work = Callable[[], None]
"""What a forked process is to do."""


class Closable(Protocol):
    """Something with a method `close`: a file or a socket."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProcesses:
    """The processes of a run as the warm process knows them."""

    pid: int
    """The process of the fork server, which ends with the driver."""
    request: socket.socket
    """Leads to the driver. If it is closed before a run was sent, the driver ends."""
    status: socket.socket
    """Leads to the fork server."""
    cpus: int
    """The CPUs of the driver's Ray."""

    def close(self) -> None:
        """Close the sockets to these processes."""
        self.request.close()
        self.status.close()


def fork_run_processes(
    cpus: int, environment: dict[str, str], base_path: list[str], left: Iterable[Closable]
) -> RunProcesses | Work:
    """Fork the processes of a run. Return what this process knows of them, and in them what they are to do.

    `environment` is the one with which this process has loaded its libraries, `base_path` the import path of
    workers, and `left` is what the others must not have open.
    """
    request, of_driver = socket.socketpair()
    status, of_server = socket.socketpair()
    pid = os.fork()
    if pid:
        of_driver.close()
        of_server.close()
        return RunProcesses(pid=pid, request=request, status=status, cpus=cpus)
    _handle_signals_as_at_start()
    for each in (*left, request, status):
        each.close()
    # Driver, Ray's processes and workers are a session of their own, without a terminal. Ray moves workers
    # to other process groups, which must be of the same session.
    os.setsid()
    return _be_fork_server(cpus, environment, base_path, of_driver, of_server)


def _be_fork_server(
    cpus: int,
    environment: dict[str, str],
    base_path: list[str],
    request: socket.socket,
    status: socket.socket,
) -> Work:
    """Fork the driver, then serve until it has ended. Return in children, with what they are to do."""
    server = os.getpid()
    address = f"trainyard-{server}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen(128)
    refusals, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        forked_child.die_with(server)
        listener.close()
        status.close()
        os.close(told)
        return lambda: driver.wait_and_run(
            request, driver.WarmForkServer(address, os.fdopen(refusals, encoding="utf-8")), cpus
        )
    request.close()
    os.close(refusals)
    served = fork_server.ForkServer(listener, told, environment, (pid, status)).serve()
    return lambda: forked_child.work(served, base_path)


def _handle_signals_as_at_start() -> None:
    """Handle signals as Python does when it starts."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
