"""A process that has imported PyTorch, but not Ray, and forks a fork server for each job of a pod's Ray.

Started by `template_process` as a program of its own. Ray reads the job of a worker when it is imported, so
that the workers of two jobs cannot be forked from one process that has imported Ray. A pod of a standing
cluster has workers of many jobs. So this process forks one fork server for each job, which imports Ray as a
worker of that job and then serves as on a laptop (`local_ray.fork_server`):

* This process imports nothing until the pod is ready, since a run waits for its pods.
* A client tells this process the job of its worker, and then connects to the fork server of that job.
* Ray numbers its jobs, so that the fork server of the next job is prepared when that of a job is asked for.
* A fork server ends when it has had no workers for IDLE_S seconds, or when its job was passed over.
* If this process ends, the kernel ends the fork servers, and their workers with them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from trainyard_trainer.on_ray.local_ray import fork_server

LIBRARIES = (
    *("numpy", "torch", "torch._dynamo", "torchvision", "pandas", "pyarrow", "pyarrow.dataset"),
    *("PIL.Image", "safetensors.torch", "pydantic", "threadpoolctl"),
)
"""What this process imports: none of them imports Ray."""

RAY_MODULES = (
    *("ray", "ray.train.torch", "ray.train.v2._internal.execution.controller"),
    *("trainyard_trainer.on_ray.driver", "trainyard_trainer.on_ray.worker"),
)
"""What the fork server of a job imports."""

TAKEN = b"T"
"""What a client is told when the fork server of its job accepts connections."""

IDLE_S = 120.0
"""Seconds after which a fork server without workers ends."""

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
        self._asked: set[str] = set()
        self._has_failed = False

    def serve(self, first_job: str, base_path: list[str]) -> Work:
        """Serve for ever; return in each fork server, with what it is to do."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._base_path = base_path
        work = self._fork(first_job)
        while work is None:
            client, _ = self._listener.accept()
            with client:
                work = self._answer(client)
        return work

    def _answer(self, client: socket.socket) -> Work | None:
        """Have the fork servers of a client's job and of the next one. Return in a new one its work."""
        try:
            client.settimeout(fork_server.READ_S)
            job = client.recv(2 * ID_BYTES).decode()
            later = next_job(job)
        except (OSError, ValueError):
            return None
        self._reap()
        if self._has_failed:
            return None
        if job not in self._servers and (work := self._fork(job)) is not None:
            return work
        with suppress(OSError):
            client.sendall(TAKEN)
        self._asked.add(job)
        for other, pid in self._servers.items():
            if other not in {later, *self._asked}:
                os.kill(pid, signal.SIGKILL)
        return self._fork(later) if later not in self._servers else None

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
            fork_server.die_with(template)
            self._listener.close()
            return lambda: self._be_fork_server(job, listener)
        listener.close()
        self._servers[job] = pid
        return None

    def _be_fork_server(self, job: str, listener: socket.socket) -> None:
        """Import Ray as a worker of the job, and serve; be a worker in each child."""
        os.environ["RAY_JOB_ID"] = job
        fork_server.load(RAY_MODULES)
        cause = fork_server.cause_not_to_fork() or fork_server.cause_by_trial()
        if cause is not None:
            os.write(self._status, f"{cause}\n".encode())
            os._exit(1)
        fork_server.keep_memory_shared()
        environment = self._environment | {"RAY_JOB_ID": job}
        server = fork_server.ForkServer(listener, self._status, environment, idle_s=IDLE_S)
        fork_server.work(server.serve(), self._base_path)


def await_ready(listener: socket.socket, agent_port: int) -> None:
    """Wait until Ray's agent accepts connections, as the probe of the pod does, or a client asks."""
    while not select.select([listener], [], [], LOOK_S)[0]:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", agent_port), LOOK_S).close()
            return


def main() -> None:
    """Wait until the pod is ready, import the libraries, and serve; say why if this process must not fork."""
    parent, descriptor, status = map(int, sys.argv[1:4])
    address, first_job, agent_port = sys.argv[4:]
    fork_server.die_with(parent)
    listener = socket.socket(fileno=descriptor)
    await_ready(listener, int(agent_port))
    folders = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    del sys.path[0]  # the folder of this file
    environment = fork_server.load_libraries(LIBRARIES)
    base_path = [folder for folder in sys.path if folder not in folders]
    if (cause := fork_server.cause_not_to_fork()) is not None:
        os.write(status, f"{cause}\n".encode())
        return
    fork_server.keep_memory_shared()
    template = ForkTemplate(listener, status, address, environment)
    template.serve(first_job, base_path)()


if __name__ == "__main__":
    main()
