"""A process that has imported PyTorch and Ray and forks Ray's worker processes, so that they need not.

Started by `forked_workers` as a program of its own. It imports none of the user's code: a fork has the code
as it was at the server's start.

The raylet starts `fork_client` in place of a worker. The client sends its arguments, environment, working
directory and standard streams through a socket. This process forks a child that runs Ray's
`default_worker.py` with them:

* The client sends each signal that it receives on, and ends with the exit status of the child.
* If the client ends first, this process kills the child.
* If this process ends, the kernel kills all children; and this process ends with the driver in the same way.

A fork is safe only in a process with one thread that has not used CUDA. This is checked before each fork; if
it does not hold, the answer is the reason, and the client runs Ray's own Python program. Two things of Ray
are meant for a process that is not forked:

* Ray reads its variables once, when it is imported, also the job and the raylet of a worker. The first job of
  a new Ray is known beforehand. A worker of another one is not forked. The raylet is not known: as long as
  the worker runs, its client looks whether the raylet does.
* Ray draws its ids by a generator that is seeded when the first id is drawn. After that, all children would
  draw the same ids. So no id may be drawn before the fork, which `cause_by_trial` checks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard_trainer.run_files.unix_sockets import peer_of
from trainyard_trainer.run_files.warm.load_variables import first_difference

LIBRARIES = (
    *("numpy", "torch", "torch._dynamo", "torchvision", "pandas", "pyarrow", "pyarrow.dataset"),
    *("PIL.Image", "safetensors.torch", "pydantic", "threadpoolctl"),
)
"""Libraries that workers need; none of them imports Ray."""

RAY_MODULES = (
    *("ray", "ray.train.torch", "ray.train.v2._internal.execution.controller"),
    *("trainyard_trainer.on_ray.driver", "trainyard_trainer.on_ray.worker"),
)
"""What else workers and Ray Train's controller need."""

PR_SET_PDEATHSIG = 1

READY = "ready"
"""What the server tells the driver when it has imported its modules. Each further line tells why a worker was
not forked."""

TAKEN = b"T"
"""What the server tells the driver when it has taken the environment of the run."""

READ_S = 10.0
"""Seconds within which a client must have sent its whole request."""

WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""With these variables, NumPy's OpenBLAS and Arrow's jemalloc start no threads when they are imported."""

Request = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnvironment:
    """The environment of the driver, for a Ray that was started before the driver had it."""

    before: dict[str, str]
    """The environment with which the driver has started Ray."""
    now: dict[str, str]

    def of_worker(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the environment of a worker that the raylet starts with `environment`."""
        changes = {
            name: value for name, value in environment.items() if self.before.get(name) != value
        }
        return self.now | changes


class WorkerRequest:
    """What a child needs to know to become the worker that a client stands for."""

    def __init__(self, request: Request, streams: list[int], client: int) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context", default="{}")
        parser.add_argument("--language", default="PYTHON")
        known, arguments = parser.parse_known_args(request["argv"])
        self.runtime_env: dict[str, Any] = json.loads(known.serialized_runtime_env_context)
        self.language: str = known.language
        self.flags = [each for each in arguments[:2] if re.fullmatch("-[sS]", each)]
        self.arguments: list[str] = arguments[len(self.flags) :]
        self.environment: dict[str, str] = dict(request["environ"])
        for name, value in (self.runtime_env.get("env_vars") or {}).items():
            self.environment[name] = expanded(value, self.environment)
        self.folder: str = request["cwd"]
        self.signal_mask: list[int] = request["signal_mask"]
        self.umask: int = request["umask"]
        self.streams = streams
        self.client = client


def expanded(value: str, environment: dict[str, str]) -> str:
    """Return a value in which `$NAME` is replaced, as `ray._private.utils.update_envs` does.

    `${NAME}` without such a variable becomes empty.
    """

    def replace(match: re.Match[str]) -> str:
        return environment.get(match[1] or match[2], match[0])

    text = re.sub(r"\$(?:(\w+)|\{([^}]*)\})", replace, value)
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", text)


def cause_not_to_fork() -> str | None:
    """Return why a child of this process would not be safe, or None."""
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        return f"the process that forks them has {len(threads)} threads: {', '.join(threads)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in the process that forks them"
    return None


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """What the children of a fork server run."""

    ending: str
    """The end of the first argument of their clients."""
    may_differ: Set[str] = frozenset()
    """Variables that the program reads when it needs them, although others read them at load."""
    has_group: bool = False
    """Each child leads a process group of its own, and its client's signals go to all processes of it."""


RAY_WORKER = ForkedProgram("/default_worker.py")


def cause_not_to_run(
    request: WorkerRequest, environment: dict[str, str], program: ForkedProgram = RAY_WORKER
) -> str | None:
    """Return why a child of this process would not be the process that a client stands for, or None.

    `environment` is the one with which this process has loaded its libraries.
    """
    for key in ("command_prefix", "override_worker_entrypoint", "java_jars"):
        if request.runtime_env.get(key):
            return f"its runtime environment has {key}"
    if request.runtime_env.get("py_executable", sys.executable) != sys.executable:
        return "its runtime environment has a Python of its own"
    if request.language != "PYTHON" or not request.arguments[0].endswith(program.ending):
        return f"it is no Python worker: {request.language} {request.arguments[0]}"
    if request.flags != own_flags():
        return f"it starts Python with {' '.join(request.flags)}"
    if name := first_difference(environment, request.environment, program.may_differ):
        return f"{name} is read when a library is loaded, and differs"
    return cause_not_to_fork()


@contextmanager
def no_ids_drawn() -> Iterator[None]:
    """Let the classes that `ray.remote` decorates in this block get ids that are not drawn by Ray."""
    import ray.actor

    actor: Any = ray.actor
    original = actor.ActorClassID

    class SystemIds:
        @staticmethod
        def from_random() -> Any:
            return original(os.urandom(original.size()))

    actor.ActorClassID = SystemIds
    try:
        yield
    finally:
        actor.ActorClassID = original


def cause_by_trial() -> str | None:
    """Fork two children, and return what shows in them that workers must not be forked, or None."""
    (first, is_cuda_lost), (second, _) = _try_child(), _try_child()
    if first == second:
        return "an id of Ray was drawn before the fork, so that all workers would draw the same ids"
    if is_cuda_lost:
        return "CUDA was used in the process that forks them"
    return None


def _try_child() -> tuple[bytes, bool]:
    """Return the id of Ray that a child of this process draws, and whether it cannot use CUDA."""
    import torch
    from ray import NodeID

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        # PyTorch builds without CUDA have no such function.
        is_cuda_lost = getattr(torch._C, "_cuda_isInBadFork", lambda: False)()
        os.write(write, bytes([is_cuda_lost]) + NodeID.from_random().binary())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        found = told.read()
    os.waitpid(pid, 0)
    return found[1:], bool(found[0])


def own_flags() -> list[str]:
    """Return the options of this Python for site-packages, in Ray's order."""
    return ["-S"] * sys.flags.no_site + ["-s"] * sys.flags.no_user_site


class ForkServer:
    """Answers the clients one after the other, and passes signals and exit statuses on."""

    def __init__(
        self,
        listener: socket.socket,
        status: int | None,
        environment: dict[str, str],
        driver: tuple[int, socket.socket] | None = None,
        idle_s: float | None = None,
        program: ForkedProgram = RAY_WORKER,
    ) -> None:
        """`status` is the file that is told why a child was not forked, if not only its client is told.

        `driver` is the driver's process, if it is a child of this one, and who waits for its status.

        With `idle_s`, this process ends if it has forked children and has had none for so many seconds.
        """
        self._listener = listener
        self._status = status
        self._environment = environment
        self._driver = driver
        self._idle_s = idle_s
        self._program = program
        self._has_forked = False
        self._run: RunEnvironment | None = None
        self._children: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}  # by the file descriptor of the client's socket
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)

    def serve(self) -> WorkerRequest:
        """Serve for ever; return in each child, with what it is asked to do."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno())
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        if self._driver is not None:
            pid, front_end = self._driver
            self._children[pid], self._pids[front_end.fileno()] = front_end, pid
            poll.register(front_end, select.POLLIN)
            self._wakes.send(b"\0")  # it may have ended already
        while True:
            if not (events := poll.poll(self._patience_ms())):
                os._exit(0)
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    client, _ = self._listener.accept()
                    if (request := self._answer(client)) is not None:
                        return request
                    if client.fileno() >= 0:
                        poll.register(client, select.POLLIN)
                elif descriptor == self._woken.fileno():
                    self._woken.recv(4096)
                    for ended in self._reap():
                        with suppress(KeyError):  # its client was gone before
                            poll.unregister(ended)
                        ended.close()
                elif descriptor in self._pids and not self._pass_on(descriptor):
                    poll.unregister(descriptor)

    def _patience_ms(self) -> float | None:
        """Return the milliseconds without an event after which this process ends; None for ever."""
        if self._idle_s is None or self._children or not self._has_forked:
            return None
        return self._idle_s * 1000

    def _answer(self, client: socket.socket) -> WorkerRequest | None:
        """Fork a child for a client, or tell it why not. Return the request in the child."""
        try:
            message, streams, process = receive(client)
        except (OSError, EOFError, ValueError):
            client.close()
            return None
        if self._driver is not None and process == self._driver[0]:
            self._run = RunEnvironment(**message)
            client.sendall(TAKEN)
            client.close()
            return None
        if self._run is not None:
            message["environ"] = self._run.of_worker(message["environ"])
        request = WorkerRequest(message, streams, process)
        cause = cause_not_to_run(request, self._environment, self._program)
        pid = 0
        if cause is None:
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._leave(client)
                die_with(server)
                return request
            if self._program.has_group:
                with suppress(ProcessLookupError):
                    os.setpgid(pid, pid)
        for stream in request.streams:
            os.close(stream)
        refusal = {"cause": cause, "environ": message["environ"]}
        with suppress(OSError):
            client.sendall(struct.pack("i", pid) + (b"" if pid else json.dumps(refusal).encode()))
        if cause is None:
            self._has_forked = True
            self._children[pid] = client
            self._pids[client.fileno()] = pid
        else:
            client.close()
            if self._status is not None:
                with suppress(BrokenPipeError):  # the driver ends
                    os.write(self._status, f"{cause}\n".encode())
        return None

    def _pass_on(self, descriptor: int) -> bool:
        """Pass signals of a client on to its child. Return False if the client is gone, and kill its child.

        The driver is not killed: it watches itself whether its front end is there, and saves first.
        """
        pid = self._pids[descriptor]
        try:
            numbers = self._children[pid].recv(64)
        except OSError:
            numbers = b""
        is_driver = self._driver is not None and pid == self._driver[0]
        # The child has not been waited for, so that its id is still its own.
        send = os.killpg if self._program.has_group else os.kill
        for number in numbers or ([] if is_driver else [signal.SIGKILL]):
            send(pid, number)
        return bool(numbers)

    def _reap(self) -> list[socket.socket]:
        """Tell the clients of children that have ended how; return these clients' sockets.

        This process ends with the driver, if that is its child, and the kernel then ends the workers.
        """
        ended = []
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                client = self._children.pop(pid)
                del self._pids[client.fileno()]
                with suppress(OSError):
                    client.sendall(struct.pack("i", status))
                if self._driver is not None and pid == self._driver[0]:
                    os._exit(0)
                ended.append(client)
        return ended

    def _leave(self, client: socket.socket) -> None:
        """Close in a child what belongs to the server, and handle signals as Python does at its start."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (self._listener, self._woken, self._wakes, client, *self._children.values()):
            each.close()
        if self._status is not None:
            os.close(self._status)


def receive(client: socket.socket) -> tuple[Request, list[int], int]:
    """Receive a message, its file descriptors and the process id of its sender, of the same user."""
    process, user = peer_of(client)
    if user != os.getuid():
        raise ValueError("the client belongs to another user")
    client.settimeout(READ_S)
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    (left,) = struct.unpack("I", head)
    parts = []
    while left:
        part = client.recv(left)
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    client.settimeout(None)
    return json.loads(b"".join(parts)), list(streams), process


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end it at once if that is already so."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def become(
    request: WorkerRequest, base_path: list[str], program: ForkedProgram = RAY_WORKER
) -> None:
    """Give this child all that a process has which is started in place of its client."""
    for descriptor, stream in enumerate(request.streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    # The client has them from the raylet, which may have changed them.
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(0, 0 if program.has_group else os.getpgid(request.client))
    with suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request.client))
        for limit in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
            resource.setrlimit(limit, resource.prlimit(request.client, limit))
    with suppress(OSError):
        score = Path(f"/proc/{request.client}/oom_score_adj").read_text()
        if score != Path("/proc/self/oom_score_adj").read_text():
            Path("/proc/self/oom_score_adj").write_text(score)
    os.umask(request.umask)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    folders = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(Path(request.arguments[0]).parent), *folders, *base_path]
    sys.argv[:] = request.arguments
    importlib.invalidate_caches()
    gc.unfreeze()
    separate_random_numbers()
    restore_threads()


def separate_random_numbers() -> None:
    """Give this child its own random numbers; Python's module `random` does this itself."""
    import multiprocessing

    import numpy as np

    np.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def restore_threads() -> None:
    """Let the numeric libraries use as many threads as if they were loaded by this child.

    Ray sets OMP_NUM_THREADS for a task when it begins, unless it is set already.
    """
    import ray._private.utils
    import threadpoolctl
    import torch

    if not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys():
        threadpoolctl.threadpool_limits(len(os.sched_getaffinity(0)), user_api="blas")
    set_variable = ray._private.utils.set_omp_num_threads_if_unset

    def set_threads() -> bool:
        is_set = set_variable()
        if is_set:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return is_set

    ray._private.utils.set_omp_num_threads_if_unset = set_threads


def load(modules: Iterable[str]) -> dict[str, str]:
    """Import modules, so that forks have them; return the environment with which they were loaded."""
    environment = load_libraries(())
    with no_ids_drawn():
        for module in modules:
            importlib.import_module(module)
    return environment


def load_libraries(modules: Iterable[str]) -> dict[str, str]:
    """Do as `load`, for modules that do not import Ray."""
    environment = dict(os.environ)
    for name, value in WITHOUT_THREADS.items():
        os.environ.setdefault(name, value)
    for module in modules:
        importlib.import_module(module)
    return environment


def keep_memory_shared() -> None:
    """Let a later collection of garbage in a child write to no memory that was there before the fork."""
    gc.collect()
    gc.freeze()


def work(request: WorkerRequest, base_path: list[str]) -> None:
    """Be a worker, in a child of the server."""
    become(request, base_path)
    runpy.run_path(request.arguments[0], run_name="__main__")


def main() -> None:
    """Import the modules, tell the driver whether forking is safe, and serve."""
    parent, listener, status = map(int, sys.argv[1:4])
    die_with(parent)
    folders = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    del sys.path[0]  # the folder of this file
    environment = load(sys.argv[5:])
    base_path = [folder for folder in sys.path if folder not in folders]
    cause = cause_not_to_fork() or cause_by_trial()
    os.write(status, f"{cause or READY}\n".encode())
    if cause is not None:
        return
    keep_memory_shared()
    work(ForkServer(socket.socket(fileno=listener), status, environment).serve(), base_path)


if __name__ == "__main__":
    main()
