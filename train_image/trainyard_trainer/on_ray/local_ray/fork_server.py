"""A process that has imported PyTorch and Ray and forks Ray's worker processes, so that they need not.

Started by `forked_workers` as a program of its own. It imports none of the user's code: a fork has the code
as it was at the server's start.

The raylet starts `fork_client` in place of a worker. The client sends its arguments, environment, working
directory and standard streams through a socket. This process forks a child that runs Ray's
`default_worker.py` with them:

* The client sends each signal that it receives on, and ends with the exit status of the child.
* If the client ends first, this process kills the child.
* If this process ends, the kernel kills all children; and this process ends with the driver in the same way.

Before each fork it is checked whether one is safe (`forkable`); if not, the answer is the reason, and the
client runs Ray's own Python program. Ray reads its variables once, when it is imported, also the job and the
raylet of a worker. The first job of a new Ray is known beforehand. A worker of another one is not forked. The
raylet is not known: as long as the worker runs, its client looks whether the raylet does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

from trainyard_trainer.on_ray.local_ray.fork_request import (
    RAY_WORKER,
    ForkedProgram,
    RunEnvironment,
    WorkerRequest,
    cause_not_to_run,
    receive,
)
from trainyard_trainer.on_ray.local_ray.forkable import (
    cause_by_trial,
    cause_not_to_fork,
    keep_memory_shared,
    load,
)
from trainyard_trainer.on_ray.local_ray.forked_child import die_with, work

READY = "ready"
"""What the server tells the driver when it has imported its modules. Each further line tells why a worker was
not forked."""

TAKEN = b"T"
"""What the server tells the driver when it has taken the environment of the run."""


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
