"""The front end of this program: the command on the same machine that started it and shows its output.

A program whose front end is killed must not go on alone. The front end holds the only write end of a pipe:
its read end is at its end as soon as the front end is gone, whatever ended it. This works on Linux and macOS
and has no race, since a pipe that is at its end stays there. The read end is this program's standard input,
and processes that it starts get /dev/null in its place; or it is another file descriptor, and the program
may read its standard input.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path

from trainyard_trainer.run_files.driver_output import FRONT_END_VARIABLE

POLL_S = 0.5
"""Seconds between two checks of the parent process."""

_front_end_pid: int | None = None


def pid() -> int | None:
    """Return the process id of the front end; None if this program was started without one."""
    return _front_end_pid


def watch(
    end: Callable[[], None], environment: MutableMapping[str, str] = os.environ
) -> threading.Thread | None:
    """Call `end` in another thread as soon as the front end is gone; do nothing without a front end."""
    global _front_end_pid
    value = environment.pop(FRONT_END_VARIABLE, None)
    if value is None:
        return None
    process, _, descriptor = value.partition(":")
    _front_end_pid = int(process)
    if descriptor:
        pipe = int(descriptor)
        os.set_inheritable(pipe, False)
    else:
        pipe = os.dup(sys.__stdin__.fileno() if sys.__stdin__ else 0)
        _replace(0, os.devnull, os.O_RDONLY)
    thread = threading.Thread(target=_wait, args=(pipe, end), name="front-end", daemon=True)
    thread.start()
    return thread


def terminate() -> None:
    """End this program as SIGTERM does: a run saves a checkpoint first."""
    # The pipe of the output is closed too: nothing that is printed from now on may fail.
    _replace(1, os.devnull, os.O_WRONLY)
    with suppress(BrokenPipeError):
        print("the command that started this program is gone: ending as at SIGTERM", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    """End this program and its child processes as Ctrl-C does."""
    os.killpg(os.getpgrp(), signal.SIGINT)


def keep_stderr_in(path: str) -> None:
    """Send standard error, and that of all processes which are started from now on, to a new file.

    A file of that name is replaced and not shortened: a process of an earlier attempt may still write to it.
    """
    if _front_end_pid is not None:
        Path(path).unlink(missing_ok=True)
        _replace(2, path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def print_error(text: str) -> None:
    """Print a line on standard error; on standard output if the file of `keep_stderr_in` cannot be written.

    The file is in the run's folder, so that a full disk would swallow the error that describes it.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(1, 2)
        print(text, file=sys.stderr, flush=True)


def _wait(pipe: int, end: Callable[[], None]) -> None:
    """Wait until the pipe is at its end, or the parent process is gone, and call `end`.

    A process that the front end has forked may keep the pipe open. The parent is another process under
    torchrun, and for a driver of the warm process: on Linux, the pidfd of the front end tells its end.
    """
    parent, front_end = os.getppid(), _pidfd(_front_end_pid)
    while os.getppid() == parent:
        readable, _, _ = select.select([pipe, *front_end], [], [], POLL_S)
        if not readable:
            continue
        if pipe not in readable or not os.read(pipe, 1):
            break
    end()


def _pidfd(process: int | None) -> list[int]:
    """Return the file descriptor that is readable when a process has ended, if the system has such."""
    if sys.platform == "linux" and process is not None:
        with suppress(OSError):
            return [os.pidfd_open(process)]
    return []


def _replace(descriptor: int, path: str, flags: int) -> None:
    """Let a file descriptor of this process, and of its later child processes, stand for another file."""
    opened = os.open(path, flags, 0o666)
    os.dup2(opened, descriptor)
    os.close(opened)
