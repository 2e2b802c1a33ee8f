"""A run on this machine: the same training program, on a local Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from launcher.config import RunConfig
from launcher.errors import ConfigError, RunFailed
from launcher.plan import trainer_config
from launcher.watch import PROGRESS, SUMMARY, Phase, Sight, record_of
from trainer.config import CONFIG_VARIABLE, Scaling, Storage, TrainerConfig

NEEDED = ("ray", "torch", "torchvision", "sklearn", "matplotlib")
CONFIG_ERROR = 2
"""Exit code of the trainer for a config that cannot work."""


def local_config(run: RunConfig, storage: Path, cpus: int) -> TrainerConfig:
    """The run for this machine: as many workers as on a cluster, its CPUs shared among them."""
    workers = run.resources.gpus or run.resources.workers or 0
    scaling = Scaling(
        num_workers=workers,
        use_gpu=run.resources.gpus is not None,
        cpus_per_worker=max(1, cpus // workers),
    )
    return trainer_config(run, scaling, Storage(path=str(storage.resolve())))


def train_locally(config: TrainerConfig) -> Iterator[Sight | str]:
    """Sights and log lines of the training program until it has ended well.

    Raises ConfigError if its packages are missing or it refuses the config, RunFailed if it fails.
    """
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"training on this machine needs packages that are not installed: {', '.join(missing)}",
            "Install them with `pip install 'trainyard[train]'`, or `make setup` in a clone.",
        )
    folder = Path(config.storage.path) / config.name
    folder.mkdir(parents=True, exist_ok=True)
    noise = folder / "ray.log"
    environment = os.environ | {CONFIG_VARIABLE: config.model_dump_json()}
    with noise.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        )
        try:
            yield Sight(submission=config.name, phase="starting")
            assert process.stdout is not None
            for line in process.stdout:
                yield _read_line(config.name, line.rstrip("\n"))
            code = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
    if code == 0:
        return
    last = noise.read_text(errors="replace").strip().splitlines()[-1:]
    if code == CONFIG_ERROR:
        raise ConfigError(f"the training program refused run {config.name}", *last)
    raise RunFailed(
        f"run {config.name} failed (exit code {code})", *last, f"Ray's own output: {noise}"
    )


def _read_line(run: str, line: str) -> Sight | str:
    """A line of the trainer's output: progress, the summary, or words for the user."""
    if (progress := record_of(line, PROGRESS)) is not None:
        return Sight(submission=run, phase="running", progress=progress)
    if (summary := record_of(line, SUMMARY)) is not None:
        phase: Phase = "succeeded" if summary["outcome"] == "succeeded" else "failed"
        return Sight(submission=run, phase=phase, summary=summary)
    return line
