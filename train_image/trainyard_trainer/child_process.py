"""Child processes that end together with the process that started them, even if that one is killed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.run_files import exit_codes

STOP_WAIT_S = 20.0
"""Seconds that a program has to end after SIGTERM; a pod has 30 s by default."""

POLL_S = 1.0
"""Seconds between two calls of `poll` while a program runs."""

READ_S = 5.0
"""Seconds to read the last output for: a process that the program left behind may keep the pipe open."""

WRAPPER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if int(sys.argv[2]) not in (0, os.getppid()):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""A Python program that sets its parent death signal (PR_SET_PDEATHSIG of prctl(2)), and runs a command."""


def killed_with_parent(command: Sequence[str], *, parent: int | None = None) -> list[str]:
    """Return a command that runs `command` and is killed by the kernel (Linux) when its parent ends.

    `parent` is the process that will start it: by default this one, 0 if it is not known. The command must be
    started by a thread that lives as long as the parent, since the kernel watches the thread.
    """
    parent_id = os.getpid() if parent is None else parent
    # -I: in a folder of the user's code, `import ctypes` could find a file of it.
    return [sys.executable, "-I", "-c", WRAPPER, f"{signal.SIGKILL:d}", f"{parent_id}", *command]


def end_with_parent() -> None:
    """End this process of `multiprocessing` when the process that asked for it ends.

    A process that is killed cannot end its children, and with `forkserver` they were forked from another.
    """
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(exit_codes.FAILED)


def run_program(
    command: Sequence[str],
    folder: Path | None,
    environment: Mapping[str, str],
    *,
    say: Callable[[str], None],
    poll: Callable[[], None],
    failure: Callable[[int, str], TrainerError],
) -> None:
    """Run a program in a folder until it ends.

    Each line of its output is passed to `say`, and `poll` is called every second. If `poll` raises, the
    program gets SIGTERM, and SIGKILL after `STOP_WAIT_S`. If the program ends with another exit code than 0,
    the error is what `failure` returns for this code and for a description of the end. Raises ConfigError if
    there is no such program.
    """
    _require_program(command[0], folder, environment)
    process = subprocess.Popen(
        killed_with_parent(command),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_say_all, args=(process.stdout, say), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            poll()
    finally:
        _end(process, say)
        reader.join(READ_S)
    if process.returncode != 0:
        raise failure(process.returncode, f"the program ended with {_ending(process.returncode)}")


def _require_program(name: str, folder: Path | None, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if there is no such program."""
    # A name with a slash is a path relative to the working directory.
    path = str((folder or Path.cwd()) / name) if "/" in name else name
    if shutil.which(path, path=environment["PATH"]) is None:
        raise ConfigError(
            f"the command cannot be started: there is no program {name}\n"
            "       It must be in the image, or in the folder that `code` names."
        )


def _say_all(lines: Iterable[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line.rstrip("\n"))


def _end(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Stop a program that still runs, by SIGTERM and then SIGKILL, and kill all its child processes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            say(f"the program still runs {STOP_WAIT_S:g} s after SIGTERM: it is killed")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    """Return how a program has ended. A shell reports a signal that ended its child as 128 + number."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    if code - 128 in {*signal.Signals}:
        return f"exit code {code} (128 + {signal.Signals(code - 128).name})"
    return f"exit code {code}"
