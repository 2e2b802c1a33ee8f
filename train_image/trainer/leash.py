"""A program that the kernel ends together with the process that started it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

PROGRAM = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Asks for a signal at the parent's death (PR_SET_PDEATHSIG of prctl(2)), and becomes the program."""


def leashed(command: Sequence[str], at_death: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command that starts it so. It is to be started in the thread that lives longest."""
    return [sys.executable, "-c", PROGRAM, f"{at_death:d}", *command]
