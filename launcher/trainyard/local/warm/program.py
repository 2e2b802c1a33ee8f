"""A training program that was forked from the warm process of this machine.

It is used like a process of `subprocess`, though it is no child of this process: its parent, a child of the
warm process, passes on signals and sends its exit status.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from trainyard.errors import RunFailed
from trainyard.local.warm.greeting import Greeting, greeted
from trainyard_trainer.config.trainer_config import AttemptConfig, TrainerConfig
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE
from trainyard_trainer.run_files.warm import messages

PROGRAM = "trainyard_trainer.program"

START_S = 90.0
"""Seconds within which the driver must have started its Ray."""


class WarmProgram:
    """The driver of a run; its standard input is a pipe that is at its end when this process is gone."""

    def __init__(self, status: socket.socket, stdin: int, stdout: int) -> None:
        self._status = status
        self._stdin = os.fdopen(stdin, "wb")
        self.stdout = TextIOWrapper(os.fdopen(stdout, "rb"), errors="replace")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        self._status.setblocking(False)
        with suppress(BlockingIOError):
            self._receive()
        return self.returncode

    def wait(self) -> int:
        """Wait until the program has ended, and return its exit code; that of a signal is negative."""
        self._status.setblocking(True)
        return self._receive()

    def terminate(self) -> None:
        """Ask the program to end, by SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the program at once, by SIGKILL."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Close this process's ends of all pipes. A program that still runs saves, and ends."""
        self._stdin.close()
        self.stdout.close()
        self._status.close()

    def _receive(self) -> int:
        if self.returncode is None:
            try:
                status = self._status.recv(4)
            except ConnectionResetError:  # a signal was not read any more
                status = b""
            # Without a status, the parent of the program was killed, and the program with it.
            code = os.waitstatus_to_exitcode(struct.unpack("i", status)[0]) if status else None
            self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(BrokenPipeError):
                self._status.send(bytes([number]))


def start(
    config: AttemptConfig, environment: Mapping[str, str], stderr: int
) -> tuple[WarmProgram | None, str | None]:
    """Start a run in the warm process, if there is one. Return the program, and a line about it.

    `environment` is that of the program, and `stderr` a file for its standard error.
    """
    try:
        with greeted() as greeting:
            if greeting is None:
                return None, None
            cause = _cause_not_to_use(config, environment, greeting)
            if cause is not None:
                return None, f"the warm Ray is not used: {cause}"
            assert isinstance(config, TrainerConfig)
            program = _started(greeting, config.scaling.cpus, environment, stderr)
            ready = "" if greeting.state.is_ready else ", which had to be started first"
            return program, f"this run uses the warm Ray{ready}"
    except RunFailed as error:
        return None, error.what


def _cause_not_to_use(
    config: AttemptConfig, environment: Mapping[str, str], greeting: Greeting
) -> str | None:
    """Return why a run cannot use the warm process, or None."""
    if not isinstance(config, TrainerConfig):
        return "it is for recipes that train a network"
    if config.scaling.use_gpu:
        return "it is for runs without GPUs"
    if (mode := environment.get(LOCAL_RAY_VARIABLE, "forked")) != "forked":
        return f"{LOCAL_RAY_VARIABLE} = {mode} asks for another"
    if different := greeting.difference({**environment, **config.env}):
        return (
            f"{different} is not the same as when it was started; `trainyard warm up` replaces it"
        )
    return None


def _started(
    greeting: Greeting, cpus: int, environment: Mapping[str, str], stderr: int
) -> WarmProgram:
    """Have the warm process start the program. Raises RunFailed if it does not."""
    request, status = _sockets(greeting.connection, cpus)
    stdin_end, stdin = os.pipe()
    stdout, stdout_end = os.pipe()
    program = WarmProgram(status, stdin, stdout)
    try:
        with request:
            request.settimeout(START_S)
            message = {
                "program": PROGRAM,
                "environ": dict(environment),
                "folder": str(Path.cwd()),
                "umask": _umask(),
            }
            messages.send(request, message, [stdin_end, stdout_end, stderr])
            answer = b""
            while not answer.endswith(messages.STARTED):
                more = request.recv(2)
                if not more:
                    raise EOFError("its Ray did not start")
                answer += more
    except (OSError, EOFError) as error:
        program.close()
        raise RunFailed(
            f"the warm Ray is not used: {error}; its log is {messages.folder_path() / messages.LOG}"
        ) from None
    except BaseException:
        program.close()
        raise
    finally:
        os.close(stdin_end)
        os.close(stdout_end)
    return program


def _sockets(connection: socket.socket, cpus: int) -> tuple[socket.socket, socket.socket]:
    """Ask for a run, and return the sockets to its driver and to the driver's parent. Raises RunFailed."""
    try:
        messages.send(connection, {"command": messages.RUN, "cpus": cpus})
        _, descriptors = messages.receive(connection, 2)
    except (OSError, EOFError, ValueError) as error:
        raise RunFailed(
            f"the warm Ray is not used: no answer ({error or 'it has ended'})"
        ) from None
    request, status = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    return request, status


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
