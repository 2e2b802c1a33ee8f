"""One attempt of a run with the user's code: start or join Ray, run the program, and record the outcome."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainyard_trainer.on_ray.ray_cluster import (  # first: Ray reads some variables when it is imported
    node_facts,
    ray_running,
    require_room,
)
from trainyard_trainer.run_files.driver_output import SUMMARY, record_line

# isort: split
from trainyard_trainer.child_process import run_program
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import (
    FunctionConfig,
)
from trainyard_trainer.environment import change_runtime_env
from trainyard_trainer.errors import ConfigError, StorageError, TrainerError, UserCodeFailed
from trainyard_trainer.on_ray.ray_snapshot import RaySnapshot
from trainyard_trainer.run_files.exit_codes import WRONG_INPUT
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.attempt_scope import (
    running_attempt,
    say,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output, ProgressPrinter
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_limit import limited
from trainyard_trainer.run_folder.run_record import RunRecord, without_record
from trainyard_trainer.run_folder.submission import record_submission
from trainyard_trainer.user_code.failure_text import FailureText
from trainyard_trainer.user_code.library_results import open_to_group, require_finished
from trainyard_trainer.user_code.program import (
    UserCode,
    command_of,
    environment_of,
    program_text,
)
from trainyard_trainer.versions import versions

SNAPSHOT_S = 5.0
"""Seconds between two copies of Ray Train's state while the program runs."""


def run(config: UserCode, output: Output) -> None:
    """Run the user's program once, to its end. Raises TrainerError if it fails."""
    started_at = time.monotonic()
    config = with_absolute_paths(config)
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
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
                "run_s": round(time.monotonic() - started_at, 1),
                "folder": folder.show(folder.root),
                "metrics": _last_metrics(folder, lease.attempt),
                "error": error,
            }

        retries = config.faults.retries
        record = RunRecord(folder, config, lease, code_sha256=config.code_sha256)
        with (
            running_attempt(folder, lease, output, summarise, retries=retries, record=record),
            limited(folder, config),
        ):
            _record_attempt(config, folder, record)
            _print_attempt(config, folder, lease.attempt)
            snapshot = RaySnapshot(folder)
            snapshot.repair(say)
            files = Path(folder.root) if folder.is_local else None
            with ray_running(config.scaling, Path.cwd()) as scratch:
                require_room(config.scaling)
                record.add_nodes(node_facts())
                environment = environment_of(config, lease.attempt, files)
                program_started_at, text = time.time(), FailureText()
                with (
                    _unpacked_code(config, folder, scratch, environment) as code,
                    ProgressPrinter(folder, output, lease.attempt),
                    _files_open_to_group(files),
                ):
                    run_program(
                        command,
                        code,
                        environment,
                        say=text.reading(say),
                        poll=lambda: _check_and_copy(lease, snapshot),
                        failure=lambda code, ending: failure_of(
                            config, folder, lease.attempt, text, code, ending
                        ),
                    )
            lease.check()
            if files is not None:
                require_finished(files, program_started_at)
            summary = summarise(None) | record.end()
            folder.write(folder.summary, json.dumps(summary, indent=2))
    say(record_line(SUMMARY, without_record(summary)))


def with_absolute_paths(config: UserCode) -> UserCode:
    """Return the config with absolute paths, since the program runs in another working directory."""
    update: dict[str, Any] = {"storage": config.storage.absolute()}
    if isinstance(config, FunctionConfig):
        update["datasets"] = {
            name: Storage(path=path).absolute().path for name, path in config.datasets.items()
        }
    return config.model_copy(update=update)


def failure_of(
    config: UserCode, folder: RunFolder, attempt: int, text: FailureText, code: int, ending: str
) -> TrainerError:
    """Return the error for a program that has ended with an exit code other than 0.

    An error that a retry cannot cure counts as such until the program has reported metrics in this attempt:
    after that, other reasons for the same error are possible, for example a file that is gone.
    """
    if isinstance(config, FunctionConfig) and code == WRONG_INPUT:
        return ConfigError(text.refusal)
    cause = text.describe()
    message = f"{ending}: {cause}" if cause else ending
    has_begun = bool(_last_metrics(folder, attempt))
    return UserCodeFailed(message, is_final=text.is_final and not has_begun)


def _last_metrics(folder: RunFolder, attempt: int) -> dict[str, Any]:
    """Return the metrics that the program reported last in this attempt; empty if it has reported none."""
    if not folder.exists(folder.progress):
        return {}
    progress = json.loads(folder.read(folder.progress))
    metrics: dict[str, Any] = progress["metrics"] if progress["attempt"] == attempt else {}
    return metrics


def check_identity(folder: RunFolder, config: UserCode) -> None:
    """Raise ConfigError if the folder belongs to a run of a built-in recipe. The user's code may change."""
    if folder.exists(folder.run) and "train" in json.loads(folder.read(folder.run)):
        raise ConfigError(
            f"the run {config.name} exists in {folder.show(folder.root)} and trains a built-in "
            "recipe.\n       Give this one another name (--name), or set the old folder aside "
            "(--fresh)."
        )


def _record_attempt(config: UserCode, folder: RunFolder, record: RunRecord) -> None:
    """Write the attempt, the config and the submission to the run's folder."""
    attempt = record.attempt.attempt
    line = {
        "attempt": attempt,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "program": program_text(config, attempt),
        "code_sha256": config.code_sha256,
        "workers": config.scaling.num_workers,
        "versions": versions(),
    }
    folder.append(folder.attempts, json.dumps(line) + "\n")
    record.begin()
    record_submission(folder, config.code_sha256)


def _print_attempt(config: UserCode, folder: RunFolder, attempt: int) -> None:
    """Print the folder, the versions and the program of the attempt."""
    code = f", in code {config.code_sha256[:8]}" if config.code_sha256 else ""
    say(f"run {config.name}, attempt {attempt}: {folder.show(folder.root)}")
    say("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    say(f"program: {program_text(config, attempt)}{code}")


@contextmanager
def _files_open_to_group(files: Path | None) -> Iterator[None]:
    """Let the storage's group read what the program has written, whether it succeeds or fails."""
    try:
        yield
    finally:
        if files is not None:
            open_to_group(files)


@contextmanager
def _unpacked_code(
    config: UserCode, folder: RunFolder, scratch: Path, environment: dict[str, str]
) -> Iterator[Path | None]:
    """Unpack the run's code into a new folder. Yields the folder; None if the run has no code.

    The program runs in that folder. `environment` gets a job config with which Ray copies it to the workers.
    """
    if config.code_sha256 is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=scratch) as code:
        code_archive.fetch(folder, config.code_sha256, Path(code))
        change_runtime_env(environment, working_dir=code)
        yield Path(code)


def _check_and_copy(lease: Lease, snapshot: RaySnapshot) -> None:
    """Check the lease, and copy Ray Train's state from time to time. Raises Fenced."""
    if lease.is_fenced:
        lease.check()
    with suppress(StorageError):  # the storage may be unavailable for a moment
        snapshot.keep(if_older_s=SNAPSHOT_S)
