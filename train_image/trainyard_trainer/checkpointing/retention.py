"""Which checkpoints of a run are kept: the newest, the best, and one for each N epochs."""

from __future__ import annotations

import math

from typing_extensions import assert_never

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
    SavedCheckpoint,
)
from trainyard_trainer.config.checkpoint import BoostingCheckpoint, CheckpointConfig
from trainyard_trainer.config.section import Metric
from trainyard_trainer.run_files.names import CheckpointName
from trainyard_trainer.run_folder.progress import Trained

RetentionRule = CheckpointConfig | BoostingCheckpoint
"""The config's section `checkpoint`, which says when to save and what to keep."""


def prune(checkpoints: Checkpoints, rule: RetentionRule, newest: str) -> list[str]:
    """Delete the checkpoints up to `newest` that the rule does not keep; returns their names.

    A checkpoint with a later name was written by an older worker group that has lost the run's folder. It is
    not counted, and the next start removes it.
    """
    there = [
        checkpoint
        for checkpoint in checkpoints.committed()
        if CheckpointName.require(checkpoint.name) <= CheckpointName.require(newest)
    ]
    kept = kept_by(rule, there)
    deleted = [checkpoint.name for checkpoint in there if checkpoint.name not in kept]
    for name in deleted:
        checkpoints.delete(name)
    return deleted


def kept_by(rule: RetentionRule, newest_first: list[SavedCheckpoint]) -> set[str]:
    """Return the names of the checkpoints that the rule keeps."""
    kept = {checkpoint.name for checkpoint in newest_first[: rule.keep]}
    if best := best_of(newest_first, rule.best):
        kept.add(best.name)
    return kept | of_every(rule.keep_every_epochs, newest_first)


def of_every(epochs: int | None, newest_first: list[SavedCheckpoint]) -> set[str]:
    """Return the names of one checkpoint for each so many epochs; none without a number of epochs."""
    return {
        checkpoint.name
        for checkpoint in _ends(newest_first)
        if epochs and checkpoint.trained.epoch % epochs == 0
    }


def best_of(newest_first: list[SavedCheckpoint], metric: Metric) -> SavedCheckpoint | None:
    """Return the checkpoint with the highest `val_accuracy` or lowest `val_loss`; the earliest of equals."""
    return max(
        _ends(newest_first), key=lambda checkpoint: _worth(checkpoint.trained, metric), default=None
    )


def _worth(trained: Trained, metric: Metric) -> float:
    """Return a number that is higher for better checkpoints; minus infinity if the metric is not finite."""
    match metric:
        case "val_accuracy":
            value, sign = trained.val_accuracy, 1
        case "val_loss":
            value, sign = trained.val_loss, -1
        case _:
            assert_never(metric)
    return sign * value if value is not None and math.isfinite(value) else -math.inf


def _ends(newest_first: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return one checkpoint for the end of each epoch, in order; the newest if it was trained twice."""
    ends = {
        checkpoint.trained.epoch: checkpoint
        for checkpoint in reversed(newest_first)
        if checkpoint.trained.steps_in_epoch == 0
    }
    return [ends[epoch] for epoch in sorted(ends)]
