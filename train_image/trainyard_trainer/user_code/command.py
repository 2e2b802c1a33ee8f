"""An attempt at code of one's own: a Ray that is large enough, the program, and what became of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainyard_trainer.on_ray.ray_cluster import (  # first: Ray reads some variables when it is imported
    address,
    ray_running,
    require_room,
)
from trainyard_trainer.run_files.driver_output import SUMMARY, record_line

# isort: split
from trainyard_trainer.child_process import run_program
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    CommandConfig,
    FunctionConfig,
    Storage,
)
from trainyard_trainer.config.user_code import fill_command
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.on_ray.ray_snapshot import RaySnapshot
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_folder.attempt_scope import say, storage_explained, under_way
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.lease import Lease
from trainyard_trainer.run_folder.log import Output, ProgressPrinter
from trainyard_trainer.run_folder.submission import record_submission
from trainyard_trainer.user_code import archive
from trainyard_trainer.versions import versions

LOOK_S = 5.0
"""Between two looks at Ray Train's state, while the program runs."""

Own = CommandConfig | FunctionConfig

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In it Ray hands the surroundings of a job to the job's `ray.init`; Ray 2.60's own name."""


def run(config: Own, output: Output) -> None:
    """Run the program until it ends well. Raises TrainerError."""
    began = time.monotonic()
    config = with_absolute_paths(config)
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    with storage_explained(config.storage):
        check_identity(folder, config)
        with Lease.acquire(folder, say) as lease:
            command = command_of(config, lease.attempt)

            def summarise(error: str | None) -> dict[str, Any]:
                return {
                    "name": config.name,
                    "outcome": "failed" if error else "succeeded",
                    "program": program_text(config, lease.attempt),
                    "attempts": lease.attempt,
                    "workers": config.scaling.num_workers,
                    "run_s": round(time.monotonic() - began, 1),
                    "folder": folder.show(folder.root),
                    "metrics": _last_metrics(folder, lease.attempt),
                    "error": error,
                }

            with under_way(folder, lease, output, summarise):
                _record(config, folder, lease.attempt)
                _describe(config, folder, lease.attempt)
                snapshot = RaySnapshot(folder)
                snapshot.repair(say)
                with ray_running(config.scaling) as scratch:
                    require_room(config.scaling)
                    surroundings = _surroundings(config, lease.attempt)
                    with (
                        _code(config, folder, scratch, surroundings) as place,
                        ProgressPrinter(folder, output, lease.attempt),
                    ):
                        run_program(
                            command,
                            place,
                            surroundings,
                            say=say,
                            look=lambda: _look(lease, snapshot),
                        )
                lease.check()
                summary = summarise(None)
                folder.write(folder.summary, json.dumps(summary, indent=2))
    say(record_line(SUMMARY, summary))


def with_absolute_paths(config: Own) -> Own:
    """The same from the working directory that the program will have."""
    update: dict[str, Any] = {"storage": config.storage.absolute()}
    if isinstance(config, FunctionConfig):
        update["datasets"] = {
            name: Storage(path=path).absolute().path for name, path in config.datasets.items()
        }
    return config.model_copy(update=update)


def command_of(config: Own, attempt: int) -> list[str]:
    """The program and its arguments."""
    if isinstance(config, FunctionConfig):
        return ["python", "-m", "trainyard_trainer.user_code.function"]
    filled = fill_command(config.command, placeholders(config, attempt))
    if config.run_with == "torchrun":
        return ["python", "-m", "trainyard_trainer.user_code.torchrun", *filled]
    return filled


def placeholders(config: Own, attempt: int) -> dict[str, str]:
    """What stands for the names in braces."""
    workers = config.scaling.num_workers
    return {
        "workers": f"{workers}",
        "gpus": f"{workers if config.scaling.use_gpu else 0}",
        "storage": config.storage.uri,
        "run": config.name,
        "attempt": f"{attempt}",
    }


def _last_metrics(folder: RunFolder, attempt: int) -> dict[str, Any]:
    """What the program has reported last in this attempt; empty where it reports nothing."""
    if not folder.exists(folder.progress):
        return {}
    progress = json.loads(folder.read(folder.progress))
    metrics: dict[str, Any] = progress["metrics"] if progress["attempt"] == attempt else {}
    return metrics


def program_text(config: Own, attempt: int) -> str:
    """What is run, in a line."""
    if isinstance(config, FunctionConfig):
        return config.function
    filled = fill_command(config.command, placeholders(config, attempt))
    return shlex.join(filled if config.run_with is None else [config.run_with, *filled])


def check_identity(folder: RunFolder, config: Own) -> None:
    """Raises ConfigError if the folder belongs to a built-in recipe. Own code may change."""
    if folder.exists(folder.run) and "train" in json.loads(folder.read(folder.run)):
        raise ConfigError(
            f"the run {config.name} exists in {folder.show(folder.root)} and is one of a built-in "
            "recipe.\n       Give this one another name (--name), or set the old folder aside "
            "(--fresh)."
        )


def _record(config: Own, folder: RunFolder, attempt: int) -> None:
    record = {
        "attempt": attempt,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "program": program_text(config, attempt),
        "code_sha256": config.code_sha256,
        "workers": config.scaling.num_workers,
        "versions": versions(),
    }
    folder.append(folder.attempts, json.dumps(record) + "\n")
    folder.write(folder.run, config.model_dump_json(indent=2))
    record_submission(folder, config.code_sha256)


def _describe(config: Own, folder: RunFolder, attempt: int) -> None:
    code = f", in code {config.code_sha256[:8]}" if config.code_sha256 else ""
    say(f"run {config.name}, attempt {attempt}: {folder.show(folder.root)}")
    say("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    say(f"program: {program_text(config, attempt)}{code}")


def _surroundings(config: Own, attempt: int) -> dict[str, str]:
    """The program's environment."""
    ours = (CODE_VARIABLE, submission.VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    told = {
        f"TRAINYARD_{name.upper()}": value for name, value in placeholders(config, attempt).items()
    }
    return {
        **inherited,
        **told,
        CONFIG_VARIABLE: config.model_dump_json(),
        "TRAINYARD_WORKER_FAILURES": f"{config.faults.worker_failures}",
        "TRAINYARD_REPLACEMENT_TIMEOUT_S": f"{config.faults.replacement_timeout_s}",
        "RAY_ADDRESS": address(),
        # `python` and `torchrun` are those that have Ray.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def _code(
    config: Own, folder: RunFolder, scratch: Path, surroundings: dict[str, str]
) -> Iterator[Path | None]:
    """The folder with the run's code, in which the program runs; its workers get a copy from Ray."""
    if config.code_sha256 is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        archive.fetch(folder, config.code_sha256, Path(place))
        job = json.loads(surroundings.get(JOB_CONFIG_VARIABLE, "{}"))
        job["runtime_env"] = {**(job.get("runtime_env") or {}), "working_dir": place}
        surroundings[JOB_CONFIG_VARIABLE] = json.dumps(job)
        yield Path(place)


def _look(lease: Lease, snapshot: RaySnapshot) -> None:
    """What is looked after while the program runs. Raises Fenced."""
    if lease.is_fenced:
        lease.check()
    with suppress(OSError):  # the storage is away for a moment
        snapshot.keep(if_older_s=LOOK_S)
