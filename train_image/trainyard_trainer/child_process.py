"""Programs that end together with the process that started them, even where that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainyard_trainer.errors import ConfigError, RunError

STOP_WAIT_S = 20.0
"""How long a program may take to leave after SIGTERM; a pod has 30 s by default."""

POLL_S = 1.0

READ_S = 5.0
"""How long its last words are read for: what a process that it has left behind holds open has no end."""

PROGRAM = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if int(sys.argv[2]) not in (0, os.getppid()):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Asks for a signal at the parent's death (PR_SET_PDEATHSIG of prctl(2)), and becomes the program."""


def leashed(command: Sequence[str], *, parent: int | None = None) -> list[str]:
    """The command that starts it so: in this process (or another one, 0 for an unknown), and there in the
    thread that lives longest. It is killed."""
    known = os.getpid() if parent is None else parent
    return [sys.executable, "-c", PROGRAM, f"{signal.SIGKILL:d}", f"{known}", *command]


def run_program(
    command: Sequence[str],
    place: Path | None,
    surroundings: Mapping[str, str],
    *,
    say: Callable[[str], None],
    look: Callable[[], None],
) -> None:
    """Run a program to its end, say each line that it says, and look about every second.

    Where the looking raises it is asked to leave, and killed if it does not. Raises RunError unless it ends
    with 0, ConfigError if there is no such program.
    """
    _require_program(command[0], place, surroundings)
    process = subprocess.Popen(
        leashed(command),
        cwd=place,
        env=surroundings,
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
            look()
    finally:
        _end(process, say)
        reader.join(READ_S)
    if process.returncode != 0:
        raise RunError(f"the program ended with {_ending(process.returncode)}")


def _require_program(name: str, place: Path | None, surroundings: Mapping[str, str]) -> None:
    """Raises ConfigError if there is no such program."""
    # With a slash in it, it is a path from where it is started.
    path = str((place or Path.cwd()) / name) if "/" in name else name
    if shutil.which(path, path=surroundings["PATH"]) is None:
        raise ConfigError(
            f"the command cannot be started: there is no program {name}\n"
            "       It must be one of the image, or of the folder that `code` names."
        )


def _say_all(lines: Iterable[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line.rstrip("\n"))


def _end(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Ask it to leave if it has not, and kill what is left of it and its children."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            say(f"the program has not left {STOP_WAIT_S:g} s after SIGTERM: it is killed")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
