"""Start and end the warm process of this machine, and measure its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from trainyard.errors import ConfigError, RunFailed
from trainyard.local.tools import own_environment
from trainyard.local.warm.greeting import WarmState, greeted
from trainyard_trainer.config.scaling import DATA_CPUS
from trainyard_trainer.run_files.programs.isolation import isolated
from trainyard_trainer.run_files.warm import messages
from trainyard_trainer.run_files.warm.facts import environment_of_warm_process

START_S = 120.0
"""Seconds within which the warm process must be ready."""

END_S = 30.0
"""Seconds within which the warm process must have ended."""

LOOK_S = 0.1


def up(idle_s: float) -> WarmState:
    """Start the warm process, and wait until its Ray is ready; return its state.

    One that fits is left as it is. One that does not, since trainyard or the environment has changed, is
    replaced. Raises ConfigError and RunFailed.
    """
    if sys.platform != "linux":
        raise ConfigError(f"a warm Ray needs Linux, and this is {sys.platform}")
    environment, _ = own_environment()
    with greeted() as greeting:
        fits = greeting is not None and greeting.difference(environment) is None
        if greeting is not None and fits and greeting.state.is_prepared:
            return _await_ready(None)
    down()
    folder = _made_folder()
    if messages.is_locked(folder):
        return _await_ready(None)  # another command has just started one
    with (folder / messages.LOG).open("wb") as log:
        process = subprocess.Popen(
            isolated(
                "trainyard_trainer.on_ray.warm.server",
                f"--idle-s={idle_s:g}",
                f"--cpus={(os.cpu_count() or 1) + DATA_CPUS}",
            ),
            cwd="/",
            env=environment_of_warm_process(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return _await_ready(process)


def status() -> tuple[WarmState, str | None] | None:
    """Return the state of the warm process, and what is not the same here and there; None without one."""
    with greeted() as greeting:
        if greeting is None:
            return None
        return greeting.state, greeting.difference(own_environment()[0])


def down() -> bool:
    """End the warm process and its Ray; runs that go on are not ended. Return whether there was one."""
    with greeted() as greeting:
        if greeting is None:
            return False
        greeting.connection.settimeout(END_S)
        try:
            messages.send(greeting.connection, {"command": messages.DOWN})
            while greeting.connection.recv(1):
                pass
        except OSError as error:
            raise RunFailed(
                f"the warm process {greeting.state.pid} does not end: {error}"
            ) from None
    return True


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and of all its descendants; what several share counts once."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = (task / "children").read_text().split()
            total += sum(memory_bytes(int(child)) for child in children)
    return total


def _made_folder() -> Path:
    """Create the folder of the warm process. Raises ConfigError if it belongs to someone else."""
    folder = messages.folder_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        messages.require_own(folder)
    except (OSError, messages.WarmFolderError) as error:
        raise ConfigError(
            f"the folder of the warm process cannot be used: {error}",
            "Set XDG_RUNTIME_DIR to a folder of your own.",
        ) from None
    return folder


def _await_ready(process: subprocess.Popen[bytes] | None) -> WarmState:
    """Wait until the Ray of the warm process is ready; `process` starts as one. Raises RunFailed."""
    folder = messages.folder_path()
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with greeted() as greeting:
            if greeting is not None and greeting.state.is_ready:
                return greeting.state
        has_ended = process is None or process.poll() is not None
        if greeting is None and has_ended and not messages.is_locked(folder):
            break
        if greeting is not None and not greeting.state.is_prepared:
            break
        time.sleep(LOOK_S)
    log = folder / messages.LOG
    raise RunFailed(
        "the warm Ray did not start",
        *log.read_text(errors="replace").splitlines()[-5:],
        f"The whole log: {log}",
    )
