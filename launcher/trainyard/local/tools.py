"""Run the trainer's tools on this machine: `python -m trainyard_trainer.tools.<module>`, in this terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from trainyard.errors import ConfigError, RunFailed

NEEDED = ("pyarrow", "torch", "torchvision")
"""The packages that every tool needs."""


def require_packages(needed: Sequence[str], what: str) -> None:
    """Raise ConfigError if a package that `what` needs is not installed."""
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{what} on this machine needs packages that are not installed: {', '.join(missing)}",
            "Install them with `pip install 'trainyard[train]'`, or `make setup` in a clone.",
        )


def run_tool(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m trainyard_trainer.tools.<module>` in this terminal and return its exit code.

    Its output and its errors go directly to the user. Raises ConfigError if packages are missing, and
    RunFailed if a signal ended it.
    """
    require_packages(NEEDED, f"`{module}`")
    with stopped_like_ctrl_c():
        process = subprocess.Popen(
            [sys.executable, "-m", f"trainyard_trainer.tools.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            # Ctrl-C must reach the tool once: from `_end`, not from the terminal too.
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    if code < 0:
        raise RunFailed(
            f"`{module}` was ended by {signal.Signals(-code).name}",
            "SIGKILL usually means that the machine ran out of memory.",
        )
    return code


@contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C inside the block, so that child processes are ended."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a tool that is still running and wait for it; a second Ctrl-C kills it."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
