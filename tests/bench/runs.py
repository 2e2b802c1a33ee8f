"""Runs of the training program to measure: as processes of their own, as `trainyard train` starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.rounds import BUILD, ROOT, say
from tests.support.settings import set_all
from trainyard_trainer.config.trainer_config import (
    CONFIG_VARIABLE,
    BuiltInConfig,
    OwnRecipeConfig,
    TrainerConfig,
)

if TYPE_CHECKING:
    from trainyard.local.training import Starter

LOOK_S = 0.5
"""How often a run is looked at."""

PATIENCE_S = 60.0
"""How long a run may take to leave once it was asked to."""

RESNET18 = {"name": "resnet18", "in_channels": 1, "num_classes": 10, "image_size": 28}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What a run has left."""

    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None if it was ended early, because enough was known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """The part of a run in which nothing starts up any more."""

    images: int = 0
    seconds: float = 0.0

    @property
    def samples_per_s(self) -> float:
        return self.images / self.seconds


def config(name: str, data: Path | Mapping[str, Any], **changes: Any) -> TrainerConfig:
    """A run of two CPU workers with one thread each; `train__epochs=3` changes one value.

    `data` is the path of prepared data, or the section `data` of a run with a user's recipe.
    """
    sections: dict[str, Any] = {
        "name": name,
        "data": dict(data) if isinstance(data, Mapping) else {"source": str(data)},
        "train": {"model": RESNET18, "epochs": 1000, "global_batch_size": 128},
        # What is measured is not to be interrupted, unless that is what is measured.
        "checkpoint": {"every_s": None},
        "faults": {"worker_failures": 0},
        "scaling": {"num_workers": 2, "use_gpu": False, "cpus_per_worker": 1},
        "storage": {"path": str(BUILD / "runs")},
    }
    set_all(sections, changes)
    kind = OwnRecipeConfig if isinstance(data, Mapping) else BuiltInConfig
    return kind.model_validate(sections)


def run(
    config: TrainerConfig,
    way: Starter = "ray",
    *,
    is_enough: Callable[[list[dict[str, Any]]], bool] = lambda metrics: False,
    look: Callable[[int, list[dict[str, Any]]], None] = lambda pid, metrics: None,
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Train from scratch to the end, or until the metrics are enough.

    `look` is called again and again, with the id of the process and the metrics so far.
    Raises RuntimeError if the run fails.
    """
    # Only now: a bare GPU machine, which needs `config` alone, has none of the launcher's packages.
    from trainyard.local.training import program

    folder = Path(config.storage.path) / config.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    variables = os.environ | dict(environment or {}) | {CONFIG_VARIABLE: config.model_dump_json()}
    is_left = False
    with (folder / "bench.log").open("wb") as log:
        process = subprocess.Popen(
            program(config, way), env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not is_left and not _has_ended(process, LOOK_S):
                metrics = read_metrics(folder)
                look(process.pid, metrics)
                is_left = is_enough(metrics)
        finally:
            _end(process)
    if process.returncode and not is_left:
        tail = (folder / "bench.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the run {config.name} failed ({process.returncode}):\n{tail}")
    summary = folder / "summary.json"
    return Ran(
        metrics=read_metrics(folder),
        summary=None if is_left else json.loads(summary.read_text()),
    )


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        if not _has_ended(process, PATIENCE_S):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are complete."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def steady(metrics: list[dict[str, Any]], batch_size: int, skip_s: float) -> Steady:
    """Images and seconds of all intervals after the first `skip_s` seconds of training.

    What an epoch's end does, validation above all, is in no interval. An epoch too short for one
    counts itself.
    """
    passed, images, seconds, before, kind_before = 0.0, 0, 0.0, 0, "epoch"
    for record in metrics:
        steps, before = record["step"] - before, record["step"]
        is_rest = record["kind"] == "epoch" and kind_before == "interval"
        kind_before = record["kind"]
        if is_rest:
            continue
        interval_s = steps * batch_size / record["samples_per_s"]
        if passed >= skip_s:
            images, seconds = images + steps * batch_size, seconds + interval_s
        passed += interval_s
    return Steady(images=images, seconds=seconds)


def samples_per_s(
    config: TrainerConfig,
    way: Starter,
    *,
    seconds: float,
    skip_s: float,
    environment: Mapping[str, str] | None = None,
) -> float:
    """Steady speed of a run, which is left after so many seconds of it."""
    size = config.train.global_batch_size
    ran = run(
        config,
        way,
        is_enough=lambda metrics: steady(metrics, size, skip_s).seconds >= seconds,
        environment=environment,
    )
    speed = steady(ran.metrics, size, skip_s).samples_per_s
    say(f"  {config.name}, {way}: {speed:.1f} samples/s")
    return speed


def samples_per_s_by_hand(config: TrainerConfig, *, seconds: float, skip_s: float) -> float:
    """The same of plain.py, which leaves nothing in a folder."""
    processes = f"--nproc-per-node={config.scaling.num_workers}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", processes]
    command += ["-m", "tests.bench.plain", f"--seconds={seconds}", f"--skip={skip_s}"]
    speed = printed_speed(command, config)
    say(f"  {config.name}: {speed:.1f} samples/s")
    return speed


def printed_speed(command: Sequence[str], config: TrainerConfig) -> float:
    """The number in the last line of a program that trains with the settings of a run."""
    done = subprocess.run(
        command,
        env=os.environ | {CONFIG_VARIABLE: config.model_dump_json()},
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout.splitlines()[-1])
