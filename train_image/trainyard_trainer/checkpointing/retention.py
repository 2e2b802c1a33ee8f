"""Which checkpoints of a run are kept: the newest, the best, and one for each N epochs."""

from __future__ import annotations

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
    SavedCheckpoint,
)
from trainyard_trainer.config.checkpoint import BoostingCheckpoint, CheckpointConfig
from trainyard_trainer.config.training.metric import ValidationGoal
from trainyard_trainer.run_files.names import CheckpointName

RetentionRule = CheckpointConfig | BoostingCheckpoint
"""The config's section `checkpoint`, which says when to save and what to keep."""


def prune(
    checkpoints: Checkpoints, rule: RetentionRule, goal: ValidationGoal, newest: str
) -> list[str]:
    """Delete the checkpoints up to `newest` that the rule does not keep; returns their names.

    `goal` says which one is the best. A checkpoint with a later name was written by an older worker group
    that has lost the run's folder. It is not counted, and the next start removes it.
    """
    there = [
        checkpoint
        for checkpoint in checkpoints.committed()
        if CheckpointName.require(checkpoint.name) <= CheckpointName.require(newest)
    ]
    kept = kept_by(rule, goal, there)
    deleted = [checkpoint.name for checkpoint in there if checkpoint.name not in kept]
    for name in deleted:
        checkpoints.delete(name)
    return deleted


def kept_by(
    rule: RetentionRule, goal: ValidationGoal, newest_first: list[SavedCheckpoint]
) -> set[str]:
    """Return the names of the checkpoints that the rule keeps."""
    kept = {checkpoint.name for checkpoint in newest_first[: rule.keep]}
    if best := best_of(newest_first, goal):
        kept.add(best.name)
    return kept | of_every(rule.keep_every_epochs, newest_first)


def of_every(epochs: int | None, newest_first: list[SavedCheckpoint]) -> set[str]:
    """Return the names of one checkpoint for each so many epochs; none without a number of epochs."""
    return {
        checkpoint.name
        for checkpoint in _ends(newest_first)
        if epochs and checkpoint.trained.epoch % epochs == 0
    }


def best_of(newest_first: list[SavedCheckpoint], goal: ValidationGoal) -> SavedCheckpoint | None:
    """Return the checkpoint with the best value of a validation metric; the earliest of equals."""

    def worth(checkpoint: SavedCheckpoint) -> float:
        return goal.worth(checkpoint.trained.metrics.get(goal.name))

    return max(_ends(newest_first), key=worth, default=None)


def _ends(newest_first: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return one checkpoint for the end of each epoch, in order; the newest if it was trained twice."""
    ends = {
        checkpoint.trained.epoch: checkpoint
        for checkpoint in reversed(newest_first)
        if checkpoint.trained.steps_in_epoch == 0
    }
    return [ends[epoch] for epoch in sorted(ends)]
