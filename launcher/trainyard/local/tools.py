"""Run the trainer's tools on this machine, in this terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from trainyard.errors import ConfigError, RunFailed
from trainyard_trainer.run_files.driver_output import FRONT_END_VARIABLE
from trainyard_trainer.run_files.programs.isolation import isolated

FOREIGN = (
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)
"""Variables of another Ray, torchrun or SLURM job, which a program of this machine would join with them."""

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


def own_environment() -> tuple[dict[str, str], list[str]]:
    """Return the environment of a program on this machine, and a line for each variable that it lacks."""
    ignored = [name for name in FOREIGN if name in os.environ]
    lines = [
        f"{name}={os.environ[name]} is ignored: commands on this machine start a Ray and workers of their own"
        for name in ignored
    ]
    kept = {name: value for name, value in os.environ.items() if name not in ignored}
    return kept | {FRONT_END_VARIABLE: f"{os.getpid()}"}, lines


def run_tool(
    module: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
) -> int:
    """Run the module `trainyard_trainer.tools.<module>` in this terminal and return its exit code.

    It reads from this terminal, and its output and its errors go directly to the user. `variables` are added
    to its environment. Raises ConfigError if packages are missing, and RunFailed if a signal ended it.
    """
    require_packages(NEEDED, f"`{module}`")
    environment, lines = own_environment()
    for line in lines:
        print(line, file=sys.stderr)
    with stopped_like_ctrl_c(), _read_end() as pipe:
        # The pipe is at its end when this process is gone: the tool then ends as at Ctrl-C.
        front_end = {FRONT_END_VARIABLE: f"{os.getpid()}:{pipe}"}
        process = subprocess.Popen(
            isolated(f"trainyard_trainer.tools.{module}", *arguments),
            pass_fds=[pipe],
            env=environment | front_end | dict(variables or {}),
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


@contextmanager
def _read_end() -> Iterator[int]:
    """Return the read end of a pipe whose write end is open until the end of the block."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


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
