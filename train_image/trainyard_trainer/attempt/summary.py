"""The end of an attempt: the checkpoint that is delivered, and the content of summary.json."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import Checkpoints, Damaged, SavedCheckpoint
from trainyard_trainer.checkpointing.retention import best_of
from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig
from trainyard_trainer.config.training.metric import LOSS, VALIDATION_PREFIX
from trainyard_trainer.config.training.recipes import best_goal, metrics_of
from trainyard_trainer.errors import RunError
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.goodput import measure
from trainyard_trainer.run_folder.measurements.progress import (
    Trained,
    cleaned,
    measured_phases,
    read_lines,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """The end of an attempt, which its summary describes."""

    attempt: int
    resumed_from: str | None
    """The name of the checkpoint from which the attempt resumed; None if it started from scratch."""
    last: SavedCheckpoint | None
    """The newest intact checkpoint of the run; None if it has none."""
    error: str | None
    """The first line of the error; None if the run has succeeded."""

    @classmethod
    def failed(cls, attempt: int, folder: RunFolder, error: str) -> AttemptEnd:
        """Return the end of an attempt that has failed with an error."""
        return cls(attempt=attempt, resumed_from=None, last=resume.choose(folder), error=error)

    @property
    def trained(self) -> Trained:
        """What the run has trained so far."""
        return self.last.trained if self.last else Trained()


def last_and_delivered(
    checkpoints: Checkpoints, config: RecipeConfig, epochs: int, unit: str
) -> tuple[SavedCheckpoint, SavedCheckpoint]:
    """Return the checkpoint at the end of training, and the one whose weights the run delivers.

    Raises RunError if the first is missing, or one of them is damaged.
    """
    folder = checkpoints.folder
    last = resume.choose(folder, print)
    if last is None or not last.trained.is_complete(epochs):
        raise RunError(
            f"training ended, but the last intact checkpoint in {folder.show(folder.checkpoints)} "
            f"is {f'{last.name} of {unit} {last.trained.epoch}' if last else 'missing'}. "
            "Start the run again: it goes on from there."
        )
    is_last = config.checkpoint.deliver == "last"
    return last, last if is_last else best_intact(checkpoints, config)


def best_intact(checkpoints: Checkpoints, config: RecipeConfig) -> SavedCheckpoint:
    """Return the best checkpoint.

    Raises RunError if it is damaged. The next best may be much worse, so that the user has to decide.
    """
    goal = best_goal(config.train, config.checkpoint.best)
    best = best_of(resume.descended(checkpoints.folder), goal)
    assert best is not None  # `last_and_delivered` has found at least one
    try:
        return checkpoints.check(best.name)
    except Damaged as reason:
        raise RunError(
            f"the best checkpoint, {best.name}, cannot be delivered: {reason}.\n"
            f"       Set checkpoint.deliver: last, or remove "
            f"{checkpoints.folder.show(checkpoints.path(best.name))} for the next best, and start again."
        ) from None


def summarise(config: TrainerConfig, folder: RunFolder, end: AttemptEnd) -> dict[str, Any]:
    """Return the content of summary.json for an attempt that trains a network."""
    return summary_of(
        config,
        folder,
        end,
        best_of(resume.descended(folder), best_goal(config.train, config.checkpoint.best)),
        own=speeds_of(config, folder, end.trained),
        workers=last_workers(config, folder),
        model=folder.model,
    )


def summary_of(
    config: RecipeConfig,
    folder: RunFolder,
    end: AttemptEnd,
    best: SavedCheckpoint | None,
    *,
    own: dict[str, Any],
    workers: int,
    model: str,
) -> dict[str, Any]:
    """Return the content of summary.json for any recipe; `own` are the values of one recipe only."""
    goodput = measure(folder, end.trained, time.time())
    summary = {
        "name": config.name,
        "outcome": "failed" if end.error else "succeeded",
        **metrics_in(config, end.trained, best.trained if best else Trained()),
        **_training_length(end.trained, best),
        **own,
        "attempts": end.attempt,
        "resumed_from": end.resumed_from,
        **_training_time(config, end.trained),
        "goodput": goodput.to_json() if goodput else None,
        "workers": workers,
        "model": folder.show(model),
        "metrics": folder.show(folder.metrics),
        "report": folder.show(folder.report),
        "error": end.error,
    }
    return cleaned(summary)


def last_workers(config: TrainerConfig, folder: RunFolder) -> int:
    """Return the number of workers of the last worker group, which changes in an elastic run."""
    if not config.scaling.is_elastic or not folder.exists(folder.progress):
        return config.scaling.num_workers
    workers: int = json.loads(folder.read(folder.progress))["workers"]
    return workers


def speeds_of(config: TrainerConfig, folder: RunFolder, trained: Trained) -> dict[str, float]:
    """Return the speed in the units of the recipe, and the model FLOPs utilisation of the last epoch.

    Only workers can measure the latter, so it is read from the metrics.
    """
    told = recipe_of(config).speeds(trained.samples_per_s)
    speeds = {name: round(speed, 1) for name, speed in told.items()}
    ended = [line for line in read_lines(folder, folder.metrics) if line["kind"] == "epoch"]
    if ended and "mfu" in ended[-1]:
        speeds["mfu"] = ended[-1]["mfu"]
    return speeds


def metrics_in(config: RecipeConfig, last: Trained, best: Trained) -> dict[str, float | None]:
    """Return loss and metrics at the end of training, and the validation metrics of the best checkpoint."""
    metrics = metrics_of(config.train)
    names = [*(metric.name for metric in metrics if not metric.is_validation_only), LOSS]
    validations = [
        f"{VALIDATION_PREFIX}{name}" for name in (*(each.name for each in metrics), LOSS)
    ]
    return {
        **{name: last.metrics.get(name) for name in (*validations, *names)},
        **{f"best_{name}": best.metrics.get(name) for name in validations},
    }


def _training_length(trained: Trained, best: SavedCheckpoint | None) -> dict[str, Any]:
    """Return the length and the speed of the training so far."""
    return {
        "best_epoch": best.trained.epoch if best else None,
        "epochs": trained.epoch,
        "stopped_early": trained.is_stopped_early,
        "steps": trained.step,
        "samples_seen": trained.samples,
        "samples_per_s": round(trained.samples_per_s, 1),
    }


def _training_time(config: RecipeConfig, trained: Trained) -> dict[str, Any]:
    """Return the seconds of training, and the seconds of each measured phase."""
    phases = measured_phases(config)
    return {
        "train_s": round(trained.train_s, 1),
        "seconds": {name: round(trained.seconds.get(name, 0.0), 3) for name in phases},
    }
