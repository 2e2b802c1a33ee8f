"""A process that has imported PyTorch, but not Ray, and forks a fork server for each job of a pod's Ray.

Started by `template_process` as a program of its own. Ray reads the job of a worker when it is imported, so
that the workers of two jobs cannot be forked from one process that has imported Ray. A pod of a standing
cluster has workers of many jobs. So this process forks one fork server for each job, which imports Ray as a
worker of that job and then serves as on a laptop (`local_ray.fork_server`):

* This process imports nothing until the pod is ready, so that it does not delay Ray's own start.
* A client tells this process the job of its worker, and then connects to the fork server of that job. On the
  head, another fork server forks the drivers of jobs (`driver_client`).
* Ray numbers its jobs, so that the fork server of the next job is prepared when nobody has asked for
  QUIET_S seconds.
* A fork server ends when it has had no workers for IDLE_S seconds, or when its job was passed over.
* If this process ends, the kernel ends the fork servers, and their children with them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from trainyard_trainer.on_ray.local_ray import fork_request, fork_server, forkable, forked_child
from trainyard_trainer.on_ray.pod_ray.driver_client import DRIVERS

DRIVER_MODULES = (*forkable.RAY_MODULES, "trainyard_trainer.program")
"""What the fork server of drivers imports."""

DRIVER = fork_request.ForkedProgram(
    DRIVERS,
    may_differ=frozenset(
        {
            *("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"),
            *("RAY_worker_niceness", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        }
    ),
    has_group=True,
)
"""The driver of a job. Ray's job server sets these variables for it, and a driver reads them when it needs
them. The job server signals all processes of a job."""

TAKEN = b"T"
"""What a client is told when the fork server of its job accepts connections."""

IDLE_S = 120.0
"""Seconds after which a fork server without workers ends."""

QUIET_S = 5.0
"""Seconds after the last request until the fork server of the next job is prepared: the job that has asked
starts meanwhile."""

LOOK_S = 0.2
"""Seconds between two looks whether the pod is ready."""

ID_BYTES = 4
"""The length of Ray's job ids."""


def next_job(job: str) -> str:
    """Return the id of the job that Ray starts after another one.

    >>> next_job("ff000000")
    '00010000'
    """
    number = int.from_bytes(bytes.fromhex(job), "little") + 1
    return number.to_bytes(ID_BYTES, "little").hex()


def address_of(template: str, job: str) -> str:
    """Return the name of the socket of a job's fork server."""
    return f"\0{template}-{job}"


Work = Callable[[], None]
"""What a forked process is to do."""


class ForkTemplate:
    """Forks the fork server of a job when a client asks for it, and that of the next job ahead of time."""

    def __init__(
        self, listener: socket.socket, status: int, address: str, environment: dict[str, str]
    ) -> None:
        """`environment` is the one with which this process has loaded its libraries."""
        self._listener = listener
        self._status = status
        self._address = address
        self._environment = environment
        self._servers: dict[str, int] = {}
        self._asked = {DRIVERS}
        self._has_failed = False

    def serve(self, first: Sequence[str], base_path: list[str]) -> Work:
        """Serve for ever; return in each fork server, with what it is to do.

        `first` are the fork servers that are there from the beginning: those of jobs, and that of drivers.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._base_path = base_path
        for name in first:
            if (work := self._fork(name)) is not None:
                return work
        later: str | None = None
        work = None
        while work is None:
            if select.select([self._listener], [], [], QUIET_S if later else None)[0]:
                client, _ = self._listener.accept()
                with client:
                    work, later = self._answer(client, later)
            elif later is not None:
                work, later = self._prepare(later), None
        return work

    def _answer(self, client: socket.socket, later: str | None) -> tuple[Work | None, str | None]:
        """Have the fork server that a client asks for. Return in a new one its work; else the job after it.

        `later` is the job whose fork server was to be prepared next.
        """
        try:
            client.settimeout(fork_request.READ_S)
            name = client.recv(2 * ID_BYTES).decode()
            following = later if name == DRIVERS else next_job(name)
        except (OSError, ValueError):
            return None, later
        self._reap()
        if self._has_failed:
            return None, None
        if name not in self._servers and (work := self._fork(name)) is not None:
            return work, None
        with suppress(OSError):
            client.sendall(TAKEN)
        self._asked.add(name)
        return None, following

    def _prepare(self, job: str) -> Work | None:
        """Fork the fork server of a job that will come, and end those of jobs that were passed over."""
        self._reap()
        for other, pid in self._servers.items():
            if other not in {job, *self._asked}:
                os.kill(pid, signal.SIGKILL)
        return None if self._has_failed or job in self._servers else self._fork(job)

    def _reap(self) -> None:
        """Forget the fork servers that have ended, and note whether one has found that it must not fork."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                self._servers = {job: each for job, each in self._servers.items() if each != pid}
                self._has_failed |= os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0

    def _fork(self, job: str) -> Work | None:
        """Fork the fork server of a job, whose socket exists at once. Return in it, with its work."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address_of(self._address, job))
        listener.listen(128)
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            forked_child.die_with(template)
            self._listener.close()
            return lambda: self._be_fork_server(job, listener)
        listener.close()
        self._servers[job] = pid
        return None

    def _be_fork_server(self, name: str, listener: socket.socket) -> None:
        """Import Ray as a worker of the job, or as a driver, and serve; be that in each child."""
        if name == DRIVERS:
            self._load(DRIVER_MODULES)
            server = fork_server.ForkServer(listener, None, self._environment, program=DRIVER)
            be_driver(server.serve(), self._base_path)
            return
        os.environ["RAY_JOB_ID"] = name
        self._load(forkable.RAY_MODULES)
        environment = self._environment | {"RAY_JOB_ID": name}
        server = fork_server.ForkServer(listener, self._status, environment, idle_s=IDLE_S)
        forked_child.work(server.serve(), self._base_path)

    def _load(self, modules: Sequence[str]) -> None:
        """Import modules; say why this process must not fork, and end it, if that is so."""
        forkable.load(modules)
        cause = forkable.cause_not_to_fork() or forkable.cause_by_trial()
        if cause is not None:
            os.write(self._status, f"{cause}\n".encode())
            os._exit(1)
        forkable.keep_memory_shared()


def be_driver(request: fork_request.WorkerRequest, base_path: list[str]) -> None:
    """Be the driver that a client stands for, in a child of the fork server of drivers."""
    import ray
    import torch

    from trainyard_trainer.on_ray.local_ray import ray_environment
    from trainyard_trainer.run_folder.measurements import startup

    startup.begin_now()
    forked_child.become(request, base_path, DRIVER)
    sys.path[:] = base_path
    # Whoever looks for the driver finds it as if it were not forked.
    raylet: Any = ray._raylet
    raylet.setproctitle(" ".join(request.arguments[2:]))
    ray_environment.set_defaults()
    time.tzset()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    # Processes that `multiprocessing` starts look at the main module.
    sys.modules["__main__"] = program = import_module(request.arguments[1])
    sys.exit(program.main([]))


def await_ready(listener: socket.socket, agent_port: int) -> None:
    """Wait until Ray's agent accepts connections, as the probe of the pod does, or a client asks."""
    while not select.select([listener], [], [], LOOK_S)[0]:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", agent_port), LOOK_S).close()
            return


def main() -> None:
    """Wait until the pod is ready, import the libraries, and serve; say why if this process must not fork."""
    parent, descriptor, status = map(int, sys.argv[1:4])
    address, agent_port, *first = sys.argv[4:]
    forked_child.die_with(parent)
    listener = socket.socket(fileno=descriptor)
    await_ready(listener, int(agent_port))
    folders = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    del sys.path[0]  # the folder of this file
    environment = forkable.load_libraries(forkable.LIBRARIES)
    base_path = [folder for folder in sys.path if folder not in folders]
    if (cause := forkable.cause_not_to_fork()) is not None:
        os.write(status, f"{cause}\n".encode())
        return
    forkable.keep_memory_shared()
    template = ForkTemplate(listener, status, address, environment)
    template.serve(first, base_path)()


if __name__ == "__main__":
    main()
