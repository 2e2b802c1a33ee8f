"""An attempt of a run with the user's code: start or join Ray, run the program, and record the outcome."""

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
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    CommandConfig,
    FunctionConfig,
)
from trainyard_trainer.config.user_code import fill_command
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.on_ray.ray_snapshot import RaySnapshot
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_folder.attempt_scope import (
    explained_storage_errors,
    running_attempt,
    say,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.lease import Lease
from trainyard_trainer.run_folder.log import Output, ProgressPrinter
from trainyard_trainer.run_folder.submission import record_submission
from trainyard_trainer.user_code import archive
from trainyard_trainer.versions import versions

SNAPSHOT_S = 5.0
"""Seconds between two copies of Ray Train's state while the program runs."""

UserCode = CommandConfig | FunctionConfig
"""The config of a run with the user's code."""

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable from which `ray.init` takes the runtime environment of a job, as Ray 2.60 names it."""


def run(config: UserCode, output: Output) -> None:
    """Run the program until it succeeds. Raises TrainerError."""
    began = time.monotonic()
    config = with_absolute_paths(config)
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    with explained_storage_errors(config.storage):
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

            with running_attempt(folder, lease, output, summarise):
                _record(config, folder, lease.attempt)
                _describe(config, folder, lease.attempt)
                snapshot = RaySnapshot(folder)
                snapshot.repair(say)
                with ray_running(config.scaling) as scratch:
                    require_room(config.scaling)
                    environment = _environment(config, lease.attempt)
                    with (
                        _code(config, folder, scratch, environment) as code,
                        ProgressPrinter(folder, output, lease.attempt),
                    ):
                        run_program(
                            command,
                            code,
                            environment,
                            say=say,
                            poll=lambda: _poll(lease, snapshot),
                        )
                lease.check()
                summary = summarise(None)
                folder.write(folder.summary, json.dumps(summary, indent=2))
    say(record_line(SUMMARY, summary))


def with_absolute_paths(config: UserCode) -> UserCode:
    """Return the config with absolute paths, since the program runs in another working directory."""
    update: dict[str, Any] = {"storage": config.storage.absolute()}
    if isinstance(config, FunctionConfig):
        update["datasets"] = {
            name: Storage(path=path).absolute().path for name, path in config.datasets.items()
        }
    return config.model_copy(update=update)


def command_of(config: UserCode, attempt: int) -> list[str]:
    """Return the program and its arguments."""
    if isinstance(config, FunctionConfig):
        return ["python", "-m", "trainyard_trainer.user_code.function"]
    filled = fill_command(config.command, placeholders(config, attempt))
    if config.run_with == "torchrun":
        return ["python", "-m", "trainyard_trainer.user_code.torchrun", *filled]
    return filled


def placeholders(config: UserCode, attempt: int) -> dict[str, str]:
    """Return the values of the placeholders in a command's arguments."""
    workers = config.scaling.num_workers
    return {
        "workers": f"{workers}",
        "gpus": f"{workers if config.scaling.use_gpu else 0}",
        "storage": config.storage.uri,
        "run": config.name,
        "attempt": f"{attempt}",
    }


def _last_metrics(folder: RunFolder, attempt: int) -> dict[str, Any]:
    """Return the metrics that the program reported last in this attempt; empty if it reports none."""
    if not folder.exists(folder.progress):
        return {}
    progress = json.loads(folder.read(folder.progress))
    metrics: dict[str, Any] = progress["metrics"] if progress["attempt"] == attempt else {}
    return metrics


def program_text(config: UserCode, attempt: int) -> str:
    """Return what the run executes, as one line."""
    if isinstance(config, FunctionConfig):
        return config.function
    filled = fill_command(config.command, placeholders(config, attempt))
    return shlex.join(filled if config.run_with is None else [config.run_with, *filled])


def check_identity(folder: RunFolder, config: UserCode) -> None:
    """Raise ConfigError if the folder belongs to a built-in recipe. The user's code itself may change."""
    if folder.exists(folder.run) and "train" in json.loads(folder.read(folder.run)):
        raise ConfigError(
            f"the run {config.name} exists in {folder.show(folder.root)} and is one of a built-in "
            "recipe.\n       Give this one another name (--name), or set the old folder aside "
            "(--fresh)."
        )


def _record(config: UserCode, folder: RunFolder, attempt: int) -> None:
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


def _describe(config: UserCode, folder: RunFolder, attempt: int) -> None:
    code = f", in code {config.code_sha256[:8]}" if config.code_sha256 else ""
    say(f"run {config.name}, attempt {attempt}: {folder.show(folder.root)}")
    say("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    say(f"program: {program_text(config, attempt)}{code}")


def _environment(config: UserCode, attempt: int) -> dict[str, str]:
    """Return the environment variables of the program."""
    internal = (CODE_VARIABLE, submission.VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in internal}
    variables = {
        f"TRAINYARD_{name.upper()}": value for name, value in placeholders(config, attempt).items()
    }
    return {
        **inherited,
        **variables,
        CONFIG_VARIABLE: config.model_dump_json(),
        "TRAINYARD_WORKER_FAILURES": f"{config.faults.worker_failures}",
        "TRAINYARD_REPLACEMENT_TIMEOUT_S": f"{config.faults.replacement_timeout_s}",
        "RAY_ADDRESS": address(),
        # `python` and `torchrun` must be those of the environment that has Ray.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def _code(
    config: UserCode, folder: RunFolder, scratch: Path, environment: dict[str, str]
) -> Iterator[Path | None]:
    """Unpack the run's code into a folder in which the program runs, and let Ray copy it to the workers."""
    if config.code_sha256 is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=scratch) as code:
        archive.fetch(folder, config.code_sha256, Path(code))
        job = json.loads(environment.get(JOB_CONFIG_VARIABLE, "{}"))
        job["runtime_env"] = {**(job.get("runtime_env") or {}), "working_dir": code}
        environment[JOB_CONFIG_VARIABLE] = json.dumps(job)
        yield Path(code)


def _poll(lease: Lease, snapshot: RaySnapshot) -> None:
    """Check the lease and copy Ray Train's state. Raises Fenced."""
    if lease.is_fenced:
        lease.check()
    with suppress(OSError):  # the storage is away for a moment
        snapshot.keep(if_older_s=SNAPSHOT_S)
