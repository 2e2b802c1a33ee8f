"""A program that the kernel ends together with the process that started it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PROGRAM = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Asks for a signal at the parent's death (PR_SET_PDEATHSIG of prctl(2)), and becomes the program."""


def leashed(command: Sequence[str], at_death: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command that starts it so: in this process, and in the thread that lives longest."""
    return [sys.executable, "-c", PROGRAM, f"{at_death:d}", f"{os.getpid()}", *command]
