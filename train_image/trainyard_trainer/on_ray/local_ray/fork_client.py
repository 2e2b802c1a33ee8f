"""The program that the raylet starts as a worker: the worker itself is forked by `fork_server`.

This process lasts as long as the worker. It passes signals on, and ends as the worker ends. If it ends first,
or the raylet does, the worker ends too. If the fork server cannot be used, it says why and becomes the worker
itself, as Ray starts it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ADDRESS_VARIABLE = "TRAINYARD_FORK_SERVER"
"""The environment variable with the name of the fork server's socket."""

TEMPLATE_VARIABLE = "TRAINYARD_FORK_TEMPLATE"
"""The environment variable with the name of the socket of `pod_ray.fork_template`, which has the fork server
of each job."""

MARK_VARIABLE = "TRAINYARD_FORKED"
"""The variable that marks in a pod the workers that may be forked: those of recipes."""

# The option with which the raylet passes on the runtime environment of a worker.
CONTEXT_OPTION = "--serialized-runtime-env-context="

LOOK_S = 1.0
"""Seconds between two looks whether the raylet runs; Ray's own value."""

PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)
"""The signals that the worker gets in place of this process."""


def run_ray_worker(arguments: Sequence[str]) -> None:
    """Replace this process by the one that Ray would have started."""
    program = next(argument for argument in arguments if argument.endswith(".py"))
    is_set_up = any("--serialized-runtime-env-context" in argument for argument in arguments)
    setup = [str(Path(program).with_name("setup_worker.py"))] if is_set_up else []
    os.execv(sys.executable, [sys.executable, *setup, *arguments])


def may_be_forked(arguments: Sequence[str]) -> bool:
    """Return whether a worker may be forked: in a pod, if the variables of its job say so."""
    if TEMPLATE_VARIABLE not in os.environ:
        return True
    contexts = [each for each in arguments if each.startswith(CONTEXT_OPTION)]
    variables = [json.loads(each.removeprefix(CONTEXT_OPTION)).get("env_vars") for each in contexts]
    return any(MARK_VARIABLE in (each or {}) for each in variables)


def connect(server: socket.socket) -> None:
    """Connect to the fork server; in a pod, to that of the worker's job."""
    template = os.environ.get(TEMPLATE_VARIABLE)
    if template is None:
        server.connect("\0" + os.environ[ADDRESS_VARIABLE])
    else:
        connect_in_pod(server, template, os.environ["RAY_JOB_ID"])


def connect_in_pod(server: socket.socket, template: str, name: str) -> None:
    """Connect to the fork server of a name, once `pod_ray.fork_template` has it."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(server.gettimeout())
        asked.connect("\0" + template)
        asked.sendall(name.encode())
        if not asked.recv(1):
            raise ConnectionRefusedError(f"no fork server for {name}")
    server.connect(f"\0{template}-{name}")


def ask(server: socket.socket, arguments: Sequence[str]) -> None:
    """Send the server all that the worker is to get from this process."""
    umask = os.umask(0)
    os.umask(umask)
    request = json.dumps(
        {
            "argv": [*arguments],
            "environ": dict(os.environ),
            "cwd": str(Path.cwd()),
            "signal_mask": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "umask": umask,
        }
    ).encode()
    socket.send_fds(server, [struct.pack("I", len(request))], [0, 1, 2])
    server.sendall(request)


def take_refusal(server: socket.socket) -> str:
    """Return why the server does not fork the worker, and take the environment that the worker has then."""
    text = server.makefile("rb").read()
    if not text:
        return ""
    refusal = json.loads(text)
    os.environ.clear()
    os.environ.update(refusal["environ"])
    return str(refusal["cause"])


def pass_on(server: socket.socket, number: int) -> None:
    """Send the number of a signal to the server. The raylet also signals a worker that has just ended."""
    with suppress(BrokenPipeError):
        server.send(bytes([number]))


def await_status(server: socket.socket, raylet: int | None) -> bytes:
    """Wait until the worker has ended, and return its status; empty if the server or the raylet has ended.

    A worker that Ray starts looks itself whether its raylet runs. A driver has none that must run.
    """
    while not select.select([server], [], [], LOOK_S)[0]:
        if raylet is not None and not is_running(raylet):
            return b""
    try:
        return server.recv(4)
    except ConnectionResetError:
        return b""


def is_running(process: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def end_as(status: int) -> NoReturn:
    """End this process as another has ended whose `waitpid` status is given."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)


def be_forked(server: socket.socket, arguments: Sequence[str], raylet: int | None = None) -> str:
    """Have a process forked, pass signals on to it, and end as it ends; return why it was not forked.

    Raises OSError if the server does not answer.
    """
    ask(server, arguments)
    answer = server.recv(4)
    (pid,) = struct.unpack("i", answer) if answer else (0,)
    if not pid:
        return take_refusal(server) or "no answer"
    server.settimeout(None)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: pass_on(server, number))
    status = await_status(server, raylet)
    # Without a status, the server kills the process when this one ends, or the kernel has killed both.
    end_as(struct.unpack("i", status)[0] if status else int(signal.SIGKILL))


def main() -> None:
    """Have the worker forked and wait for its end, or become the worker."""
    arguments = sys.argv[1:]
    if not may_be_forked(arguments):
        run_ray_worker(arguments)
    server = socket.socket(socket.AF_UNIX)
    try:
        connect(server)
        cause = be_forked(server, arguments, int(os.environ["RAY_RAYLET_PID"]))
    except OSError as error:
        cause = f"the process that forks them has ended: {error}"
    server.close()
    print(f"a worker process is not forked: {cause}", file=sys.stderr)
    sys.stderr.flush()
    run_ray_worker(arguments)


if __name__ == "__main__":
    main()
