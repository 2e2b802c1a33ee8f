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


def require_packages(needed: Sequence[str], what: str) -> None:
    """Raises ConfigError if some of the packages are not installed here; `what` needs them."""
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{what} on this machine needs packages that are not installed: {', '.join(missing)}",
            "Install them with `pip install 'trainyard[train]'`, or `make setup` in a clone.",
        )


def run_tool(module: str, arguments: Sequence[str]) -> int:
    """Exit code of `python -m trainyard_trainer.tools.<module>`, with this terminal as its own.

    What it prints goes straight to the user, its errors too: they read like the launcher's.
    Raises ConfigError if its packages are missing, RunFailed if the system killed it.
    """
    require_packages(NEEDED, f"`{module}`")
    with stopped_like_ctrl_c():
        process = subprocess.Popen(
            [sys.executable, "-m", f"trainyard_trainer.tools.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            # The tool and the processes that it starts get a Ctrl-C once, and from us.
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    if code < 0:
        raise RunFailed(
            f"`{module}` was ended by {signal.Signals(-code).name}",
            "SIGKILL is mostly the system's answer to too little memory.",
        )
    return code


@contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and a terminal that goes away end the work as Ctrl-C does: with its program."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a tool that still runs leave in good order; a second Ctrl-C does not wait for that."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
