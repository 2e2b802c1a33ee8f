"""One attempt at a run of `gradient_boosting`, from its config to its summary."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer import hold, resume
from trainer.attempt import best_intact, record_attempt
from trainer.boosting.libraries import LIBRARIES, Library
from trainer.boosting.rounds import RoundRecorder, Task, length_of, work
from trainer.boosting.table import Prepared, check_shares, prepare
from trainer.checkpoint import Checkpoint, Checkpoints, best_of
from trainer.checkpoints import result_of
from trainer.config import BoostingConfig, Table
from trainer.data.sources import absolute
from trainer.errors import ConfigError, Diverged, RunError
from trainer.folder import RunFolder
from trainer.hold import say, storage_explained, under_way
from trainer.lease import Lease
from trainer.output import Output, ProgressPrinter
from trainer.progress import SPENT, Trained, cleaned
from trainer.startup import Startup
from trainer.strategy import Worker
from trainer.versions import versions
from trainer.worker import Outcome

Fit = Callable[[Task, RunFolder, Lease], Outcome]
"""Boosts what is left of a run with as many workers as its config says, while the lease holds."""


def run(
    config: BoostingConfig,
    output: Output,
    environment: Mapping[str, str],
    *,
    without_ray: bool = False,
) -> None:
    """Bring the run to its end, from wherever it stands. Raises TrainerError."""
    fit: Fit
    if without_ray:
        require_one_process(config, environment)
        fit = fit_alone
    else:
        from trainer.boosting import workers

        fit = workers.fit
    startup = Startup(began=time.time())
    config = with_absolute_path(config)
    library = LIBRARIES[config.train.library]
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    with storage_explained(config.storage):
        resume.check_identity(folder, config)
        table = prepare(config.data, config.train, config.storage.endpoint, say)
        check_shares(table, config.scaling.num_workers)
        with Lease.acquire(folder, say) as lease:
            startup.reach("lease")
            attempt = lease.attempt
            failed = lambda error: summarise(  # noqa: E731
                config, folder, resume.choose(folder), attempt, None, error=error
            )
            with under_way(folder, lease, output, failed):
                start = resume.choose(folder)
                if start:
                    check_same_rows(start, table)
                packages = ("ray", library.package)
                record_attempt(config, folder, attempt, start, startup, packages)
                describe(config, folder, table, attempt, start)

                trained = start.trained if start else Trained()
                recorder = RoundRecorder(
                    folder,
                    length_of(config, table),
                    attempt=attempt,
                    workers=config.scaling.num_workers,
                )
                recorder.show_start(trained)
                resumed_from = start.name if start else None
                if not trained.is_complete(config.train.rounds):
                    task = Task(config=config, table=table, attempt=attempt, startup=startup)
                    startup.reach("prepare")
                    with ProgressPrinter(folder, output, attempt):
                        outcome = fit(task, folder, lease)
                    if outcome.diverged:
                        raise Diverged(outcome.diverged)
                    resumed_from, startup = outcome.resumed_from, outcome.startup
                lease.check()
                summary = finish(config, folder, table, attempt, resumed_from, startup)
    say(f"summary {json.dumps(summary)}")


def with_absolute_path(config: BoostingConfig) -> BoostingConfig:
    """The same config for workers, which have another working directory."""
    data: Table = config.data.model_copy(
        update={
            "source": absolute(config.data.source),
            "valid_source": config.data.valid_source and absolute(config.data.valid_source),
        }
    )
    return config.model_copy(update={"storage": config.storage.absolute(), "data": data})


# Without Ray.


def require_one_process(config: BoostingConfig, environment: Mapping[str, str]) -> None:
    """Raises ConfigError."""
    workers = max(config.scaling.num_workers, int(environment.get("WORLD_SIZE", 1)))
    if workers > 1:
        raise ConfigError(
            f"the run has {workers} workers, which find each other by Ray alone where train.recipe = "
            "gradient_boosting. Use one (--workers 1), or Ray."
        )


def fit_alone(task: Task, folder: RunFolder, lease: Lease) -> Outcome:
    """Boost in this process."""
    # From here on SIGTERM is a notice: the loop takes a checkpoint and leaves.
    stop = folder.stop(task.attempt)
    signal.signal(signal.SIGTERM, lambda signum, frame: folder.write(stop, ""))
    outcome = work(task, Worker(device=torch.device("cpu")))
    hold.fail_on_sigterm()
    if outcome.is_stopped:
        raise hold.Stopped
    return outcome


# Checks and records.


def check_same_rows(start: Checkpoint, table: Prepared) -> None:
    """Raises ConfigError if the files are others than those that a checkpoint has learnt from."""
    if start.images["stamp"] != table.stamp:
        raise ConfigError(
            f"the files of {table.source} are not those that checkpoint {start.name} has learnt from: names, "
            "sizes or numbers of rows differ.\n       Give this run another name (--name), or set the old "
            "folder aside (--fresh)."
        )


def describe(
    config: BoostingConfig,
    folder: RunFolder,
    table: Prepared,
    attempt: int,
    start: Checkpoint | None,
) -> None:
    """Print what is about to happen, in numbers."""
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
    """The model in a few words."""
    name = {"xgboost": "XGBoost", "lightgbm": "LightGBM"}[config.train.library]
    return f"{name} trees of depth {config.train.max_depth}"


# Ends.


def finish(
    config: BoostingConfig,
    folder: RunFolder,
    table: Prepared,
    attempt: int,
    resumed_from: str | None,
    startup: Startup,
) -> dict[str, Any]:
    """Make model, report and summary of the checkpoint to deliver; returns the summary."""
    from trainer.report.boosting import write_report  # matplotlib comes with it

    checkpoints = Checkpoints(folder)
    last = resume.choose(folder, print)
    if last is None or not last.trained.is_complete(config.train.rounds):
        raise RunError(
            f"training ended, but the last intact checkpoint in {folder.show(folder.checkpoints)} "
            f"is {f'{last.name} of round {last.trained.epoch}' if last else 'missing'}. "
            "Start the run again: it goes on from there."
        )
    delivered = last if config.checkpoint.deliver == "last" else best_intact(checkpoints, config)
    library = LIBRARIES[config.train.library]
    model = folder.read(checkpoints.path(delivered.name, library.file))
    folder.write(folder.trees(library.file), model)
    folder.write(folder.model_facts, json.dumps(facts_of(delivered, library), indent=2))
    summary = summarise(config, folder, last, attempt, resumed_from, error=None)
    summary |= {"checkpoint": delivered.name, "startup": startup.to_json()}
    write_report(
        folder,
        config,
        table,
        summary,
        delivered.trained,
        library.importance(model, delivered.images),
        title(config),
    )
    folder.write(folder.summary, json.dumps(summary, indent=2))
    return summary


def facts_of(checkpoint: Checkpoint, library: Library) -> dict[str, Any]:
    """What whoever uses the model must know: its file, its columns, and what its numbers mean."""
    train = checkpoint.config["train"]
    return {
        "run": checkpoint.config["name"],
        "checkpoint": checkpoint.name,
        "recipe": train["recipe"],
        "library": train["library"],
        "objective": train["objective"],
        "file": library.file,
        "model": train,
        "images": checkpoint.images,
        "trained": result_of(checkpoint.trained),
    }


def summarise(
    config: BoostingConfig,
    folder: RunFolder,
    last: Checkpoint | None,
    attempt: int,
    resumed_from: str | None,
    *,
    error: str | None,
) -> dict[str, Any]:
    """What summary.json holds."""
    trained = last.trained if last else Trained()
    best = best_of(resume.descended(folder), config.checkpoint.best)
    is_regression = config.train.objective == "regression"
    rooted = {
        f"{part}rmse": None if loss is None else math.sqrt(loss)
        for part, loss in (("", trained.loss), ("val_", trained.val_loss))
        if is_regression
    }
    summary = {
        "name": config.name,
        "outcome": "failed" if error else "succeeded",
        "val_accuracy": trained.val_accuracy,
        "best_val_accuracy": best.trained.val_accuracy if best else None,
        "val_loss": trained.val_loss,
        "best_val_loss": best.trained.val_loss if best else None,
        **rooted,
        "best_epoch": best.trained.epoch if best else None,
        "rounds": trained.epoch,
        "epochs": trained.epoch,
        "stopped_early": False,
        "steps": trained.step,
        "samples_seen": trained.samples,
        "images_per_s": round(trained.images_per_s, 1),
        "rows_per_s": round(trained.images_per_s, 1),
        "attempts": attempt,
        "resumed_from": resumed_from,
        "train_s": round(trained.train_s, 1),
        "seconds": {name: round(trained.seconds.get(name, 0.0), 3) for name in SPENT},
        "workers": config.scaling.num_workers,
        "model": folder.show(folder.trees(LIBRARIES[config.train.library].file)),
        "metrics": folder.show(folder.metrics),
        "report": folder.show(folder.report),
        "error": error,
    }
    return cleaned(summary)
