"""Whole attempts, as `python -m trainyard_trainer` starts them, each on a real Ray of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from attempt_server import DRIVER_FILE
from training import small_config

from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, AttemptConfig, TrainerConfig
from trainyard_trainer.on_ray.local_ray.fork_server import READY
from trainyard_trainer.on_ray.local_ray.forked_workers import ForkingProcess

PACKAGES = Path(__file__).parents[2] / "train_image"
SERVER, CLIENT = (Path(__file__).with_name(f"attempt_{each}.py") for each in ("server", "client"))


@cache
def started_server() -> ForkingProcess:
    """Start the process that forks attempts. It ends with this process."""
    return ForkingProcess(str(SERVER), (), plain_environment())


@cache
def attempt_server() -> str:
    """Wait until the process that forks attempts is ready; return the name of its socket."""
    server = started_server()
    answer = server.status.readline().strip()
    assert answer == READY, answer or server.process.wait()
    return server.address


def plain_environment() -> dict[str, str]:
    """Return the environment of all attempts: that of this process, without its own Ray."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**own, "PYTHONPATH": str(PACKAGES)}


class ForkedAttempt(subprocess.Popen[str]):
    """The process that stands for a forked driver. SIGKILL is sent to the driver itself."""

    scratch: Path

    def send_signal(self, sig: int) -> None:
        """Send a signal. This process passes on those that can be handled, and ends as the driver ends."""
        file = self.scratch / DRIVER_FILE.format(client=self.pid)
        if sig != signal.SIGKILL or self.poll() is not None or not file.exists():
            super().send_signal(sig)
            return
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), sig)


class Attempts:
    """Starts attempts at runs in one storage folder, and removes what they leave of Ray."""

    def __init__(self, storage: Path, *, is_forked: bool = False) -> None:
        """With `is_forked`, their processes are forked from one that has imported the packages."""
        self.storage = storage
        # Short, because sockets lie below it.
        self.scratch = Path(tempfile.mkdtemp(prefix="ty", dir="/tmp"))
        self.is_forked = is_forked

    def start(
        self,
        config: AttemptConfig,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        environment = {
            **plain_environment(),
            "TMPDIR": str(self.scratch),
            CONFIG_VARIABLE: config.model_dump_json(),
            **(environment or {}),
        }
        program = [str(CLIENT), attempt_server()] if self.is_forked else ["-m", "trainyard_trainer"]
        start = ForkedAttempt if self.is_forked else subprocess.Popen[str]
        process = start(
            [sys.executable, *program, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if isinstance(process, ForkedAttempt):
            process.scratch = self.scratch
        return process

    def finish(
        self,
        config: AttemptConfig,
        code: int = 0,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> str:
        """Run an attempt to its end; returns what it printed."""
        process = self.start(config, environment, arguments)
        output, _ = process.communicate()
        assert process.returncode == code, output
        return output

    def read(self, config: AttemptConfig, file: str) -> str:
        """What a file of the run says so far; nothing if it is not there."""
        path = self.storage / config.name / file
        return path.read_text() if path.exists() else ""

    def processes(self, title: str = "") -> list[int]:
        """Living processes with that in their title, but not those that stand for forked ones."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                command = (folder / "cmdline").read_bytes()
                is_client = str(CLIENT).encode() in command
                if title.encode() in command and not is_client and self._is_ours(folder):
                    found.append(int(folder.name))
            except (OSError, ValueError):
                continue
        return found

    def _is_ours(self, process: Path) -> bool:
        """Whether a process has our folder in its environment, or has it open because it was forked."""
        if str(self.scratch).encode() in (process / "environ").read_bytes():
            return True
        return any(str(each.readlink()) == str(self.scratch) for each in (process / "fd").iterdir())

    def end_processes(self) -> None:
        """Kill all that the attempts have left."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def clear(self) -> None:
        self.end_processes()
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextmanager
def reading(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """Read what a process prints while the block runs, so that it does not wait for a reader."""
    lines: list[str] = []
    assert process.stdout is not None
    thread = threading.Thread(target=lines.extend, args=(process.stdout,))
    thread.start()
    try:
        yield lines
    finally:
        if process.poll() is None:
            process.kill()
        thread.join()


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def ray_config(attempts: Attempts, workers: int = 2, **changes: Any) -> TrainerConfig:
    return small_config(attempts.storage, scaling__num_workers=workers, **changes)


def read_json(config: AttemptConfig, file: str) -> dict[str, Any]:
    return json.loads((Path(config.storage.path) / config.name / file).read_text())


def read_records(config: AttemptConfig, file: str) -> list[dict[str, Any]]:
    text = (Path(config.storage.path) / config.name / file).read_text()
    return [json.loads(line) for line in text.splitlines()]


def lines(output: str, word: str) -> list[dict[str, Any]]:
    """What follows a word at the beginning of a line, as JSON."""
    found = (line for line in output.splitlines() if line.startswith(f"{word} {{"))
    return [json.loads(line.removeprefix(word)) for line in found]


def committed(config: TrainerConfig) -> list[str]:
    folder = Path(config.storage.path) / config.name / "checkpoints"
    return sorted(manifest.parent.name for manifest in folder.glob("*/manifest.json"))


def check_metrics(config: TrainerConfig, epochs: int) -> None:
    """Each epoch has ended once, and no step is there twice."""
    records = read_records(config, "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    ended = [record for record in records if record["kind"] == "epoch"]
    assert [record["epoch"] for record in ended] == list(range(1, epochs + 1))
    assert [record["step"] for record in ended] == [11 * epoch for epoch in range(1, epochs + 1)]
    assert all({"epoch", "step", "samples", "loss"} <= record.keys() for record in records)
