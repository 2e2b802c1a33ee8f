"""One attempt of a run with `train.recipe: gradient_boosting`, from its config to its summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainyard_trainer.attempt.attempt import fit_here, train_what_is_left, with_absolute_path
from trainyard_trainer.attempt.records import record_attempt
from trainyard_trainer.attempt.summary import AttemptEnd, last_and_delivered, summary_of
from trainyard_trainer.boosting.libraries import LIBRARIES, Library
from trainyard_trainer.boosting.rounds import BoostingTask, RoundRecorder, work
from trainyard_trainer.boosting.table import PreparedTable, check_shares, prepare
from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
    SavedCheckpoint,
)
from trainyard_trainer.checkpointing.inventory import result_of
from trainyard_trainer.checkpointing.retention import best_of
from trainyard_trainer.config.trainer_config import BoostingConfig
from trainyard_trainer.config.training.recipes import best_goal
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_files.driver_output import SUMMARY, record_line
from trainyard_trainer.run_folder.attempt_scope import (
    running_attempt,
    say,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_limit import limited
from trainyard_trainer.run_folder.run_record import RunRecord, without_record
from trainyard_trainer.versions import versions

Fit = Callable[[BoostingTask, RunFolder, Lease], Outcome]
"""A function that trains the remaining rounds of a run with `scaling.num_workers` workers."""


def run(
    config: BoostingConfig,
    output: Output,
    environment: Mapping[str, str],
    *,
    without_ray: bool = False,
) -> None:
    """Train the remaining rounds of a run, then write its model, report and summary.

    Raises TrainerError.
    """
    fit: Fit
    if without_ray:
        require_one_process(config, environment)
        fit = fit_alone
    else:
        from trainyard_trainer.boosting import workers

        fit = workers.fit
    startup = Startup(began=time.time())
    config = with_absolute_path(config)
    library = LIBRARIES[config.train.library]
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    resume.check_identity(folder, config)
    table = prepare(config.data, config.train, config.storage.endpoint, say)
    check_shares(table, config.scaling.num_workers)
    with Lease.acquire(folder, say) as lease:
        startup.reach("lease")
        attempt = lease.attempt
        failed = lambda error: summarise(  # noqa: E731
            config, folder, AttemptEnd.failed(attempt, folder, error)
        )
        packages = ("ray", library.package)
        record = RunRecord(folder, config, lease, packages=packages)
        retries = config.faults.retries
        with (
            running_attempt(folder, lease, output, failed, retries=retries, record=record),
            limited(folder, config),
        ):
            start = resume.choose(folder)
            if start:
                check_same_rows(start, table)
            record_attempt(config, folder, record, start, startup, packages)
            describe(config, folder, table, attempt, start)

            task = BoostingTask(config=config, table=table, attempt=attempt, startup=startup)
            recorder = RoundRecorder(folder, task, config.scaling.num_workers)
            resumed_from, startup = train_what_is_left(
                start, recorder, startup, output, lambda: fit(task, folder, lease)
            )
            lease.check()
            summary = finish(config, folder, table, record, resumed_from, startup)
    say(record_line(SUMMARY, without_record(summary)))


def require_one_process(config: BoostingConfig, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a run without Ray has more than one worker."""
    workers = max(config.scaling.num_workers, int(environment.get("WORLD_SIZE", 1)))
    if workers > 1:
        raise ConfigError(
            f"the run has {workers} workers. With train.recipe = gradient_boosting that needs Ray. "
            "Use one worker (--workers 1), or use Ray."
        )


def fit_alone(task: BoostingTask, folder: RunFolder, lease: Lease) -> Outcome:
    """Train all rounds in this process, without Ray."""
    return fit_here(lambda: work(task, Worker(device=torch.device("cpu"))), folder, task.attempt)


def check_same_rows(start: SavedCheckpoint, table: PreparedTable) -> None:
    """Raise ConfigError if the data files are not those with which the checkpoint was trained."""
    if start.data["stamp"] != table.stamp:
        raise ConfigError(
            f"the files of {table.source} are not those with which checkpoint {start.name} was trained: "
            "names, sizes or numbers of rows differ.\n       Give this run another name (--name), or set the "
            "old folder aside (--fresh)."
        )


def describe(
    config: BoostingConfig,
    folder: RunFolder,
    table: PreparedTable,
    attempt: int,
    start: SavedCheckpoint | None,
) -> None:
    """Log the versions, the data, the model, the plan and the start of the attempt."""
    train, workers = config.train, config.scaling.num_workers
    packages = ("ray", LIBRARIES[train.library].package)
    kind = f", {len(table.classes)} classes" if table.classes else ""
    lines = (
        f"run {config.name}, attempt {attempt}: {folder.show(folder.root)}",
        "versions: "
        + ", ".join(f"{name} {version}" for name, version in versions(packages).items()),
        f"data: {table.source}, {table.train.rows:,} training and {table.valid.rows:,} validation rows, "
        f"{len(table.columns)} columns{kind}",
        f"model: {title(config)}",
        f"plan: {train.rounds} rounds, {-(-table.train.rows // workers):,} rows on each of {workers} workers",
        f"start: checkpoint {start.name}" if start else "start: from scratch",
    )
    say("\n".join(lines))


def title(config: BoostingConfig) -> str:
    """Return a short name of the model for the log and the report."""
    name = {"xgboost": "XGBoost", "lightgbm": "LightGBM"}[config.train.library]
    return f"{name} trees of depth {config.train.max_depth}"


def finish(
    config: BoostingConfig,
    folder: RunFolder,
    table: PreparedTable,
    record: RunRecord,
    resumed_from: str | None,
    startup: Startup,
) -> dict[str, Any]:
    """Write the model, the report and the summary for the delivered checkpoint, and return the summary."""
    from trainyard_trainer.boosting.report import write_report  # imports matplotlib, which is slow

    checkpoints = Checkpoints(folder)
    last, delivered = last_and_delivered(checkpoints, config, config.train.rounds, "round")
    library = LIBRARIES[config.train.library]
    model = folder.read(checkpoints.path(delivered.name, library.file))
    folder.write(folder.trees(library.file), model)
    folder.write(folder.model_facts, json.dumps(facts_of(delivered, library), indent=2))
    end = AttemptEnd(
        attempt=record.attempt.attempt, resumed_from=resumed_from, last=last, error=None
    )
    summary = summarise(config, folder, end) | record.end()
    summary |= {"checkpoint": delivered.name, "startup": startup.to_json()}
    write_report(
        folder,
        config,
        table,
        summary,
        delivered.trained,
        library.importance(model, delivered.data),
        title(config),
    )
    folder.write(folder.summary, json.dumps(summary, indent=2))
    return summary


def facts_of(checkpoint: SavedCheckpoint, library: Library) -> dict[str, Any]:
    """Return the content of model.json: the model's file, its input columns and its training settings."""
    train = checkpoint.config["train"]
    return {
        "run": checkpoint.config["name"],
        "checkpoint": checkpoint.name,
        "recipe": train["recipe"],
        "library": train["library"],
        "objective": train["objective"],
        "file": library.file,
        "model": train,
        "images": checkpoint.data,
        "trained": result_of(checkpoint.trained),
    }


def summarise(config: BoostingConfig, folder: RunFolder, end: AttemptEnd) -> dict[str, Any]:
    """Return the content of summary.json for the attempt."""
    best = best_of(resume.descended(folder), best_goal(config.train, config.checkpoint.best))
    return summary_of(
        config,
        folder,
        end,
        best,
        own={
            "rounds": end.trained.epoch,
            "rows_per_s": round(end.trained.samples_per_s, 1),
        },
        workers=config.scaling.num_workers,
        model=folder.trees(LIBRARIES[config.train.library].file),
    )
