"""Find out which checkpoints of a run are intact, which one is the best, and which ones may be deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
    Damaged,
    OtherVersion,
    SavedCheckpoint,
)
from trainyard_trainer.checkpointing.resume import why_overtaken
from trainyard_trainer.checkpointing.retention import best_of, of_every
from trainyard_trainer.config.training.metric import is_validation
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder.measurements.progress import Trained, read_lines
from trainyard_trainer.storage import StorageFolder
from trainyard_trainer.terminal import Bar

State = Literal["intact", "damaged", "overtaken", "uncommitted", "other version"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStatus:
    """A checkpoint, and whether it can be used."""

    name: str
    state: State
    problem: str | None = None
    checkpoint: SavedCheckpoint | None = None
    """The content of its manifest; None if the manifest cannot be read."""


def inspect_checkpoint(
    checkpoints: Checkpoints, name: str, *, is_thorough: bool
) -> CheckpointStatus:
    """Check a checkpoint's manifest and the sizes of its files; if `is_thorough`, also their content."""
    folder, checkpoint = checkpoints.folder, None
    try:
        checkpoint = checkpoints.read_manifest(name)
        if overtaken := why_overtaken(name, read_lines(folder, folder.starts)):
            return CheckpointStatus(
                name=name, state="overtaken", problem=overtaken, checkpoint=checkpoint
            )
        checkpoints.compare_sizes(checkpoint)
        if is_thorough:
            with Bar(name, checkpoint.bytes) as bar:
                checkpoints.check(name, bar.advance)
    except Damaged as reason:
        state: State = "damaged" if checkpoints.is_committed(name) else "uncommitted"
        return CheckpointStatus(name=name, state=state, problem=str(reason), checkpoint=checkpoint)
    except OtherVersion as reason:
        return CheckpointStatus(name=name, state="other version", problem=str(reason))
    return CheckpointStatus(name=name, state="intact", checkpoint=checkpoint)


def newest_name(newest_first: list[CheckpointStatus]) -> str | None:
    """Return the name of the newest intact checkpoint; None if there is none."""
    return next((each.name for each in newest_first if each.state == "intact"), None)


def best_name(newest_first: list[CheckpointStatus]) -> str | None:
    """Return the name of the best intact checkpoint, by the goal of the newest one."""
    intact = [each.checkpoint for each in newest_first if each.state == "intact"]
    there = [checkpoint for checkpoint in intact if checkpoint]
    if not there:
        return None
    best = best_of(there, there[0].goal)
    return best.name if best else None


def bytes_of(checkpoints: Checkpoints, name: str) -> int:
    """Return the size of a checkpoint on the storage in bytes, committed or not."""
    folder = StorageFolder(checkpoints.folder.filesystem, checkpoints.path(name))
    return sum(folder.sizes().values())


def result_of(trained: Trained | None) -> dict[str, Any]:
    """Return the progress of a checkpoint and its validation metrics, as JSON."""
    # Within an epoch, the manifest repeats the metrics of the last validation, which had other weights.
    validated = trained if trained and trained.steps_in_epoch == 0 else None
    return {
        "epoch": trained.epoch if trained else None,
        "step": trained.step if trained else None,
        "samples": trained.samples if trained else None,
        **{
            name: value if validated else None
            for name, value in (trained.metrics if trained else {}).items()
            if is_validation(name)
        },
    }


def going_of(
    checkpoints: Checkpoints, *, keep: int, keep_best: bool, every_epochs: int | None
) -> dict[str, str]:
    """Return the names of the checkpoints to delete, oldest first, each with the reason.

    The content of the checkpoints that are kept has been verified. Raises RunError if no checkpoint is
    intact.
    """
    kept: list[CheckpointStatus] = []
    others: list[CheckpointStatus] = []
    for name in checkpoints.names():
        status = inspect_checkpoint(checkpoints, name, is_thorough=len(kept) < keep)
        (kept if status.state == "intact" and len(kept) < keep else others).append(status)
    if not kept:
        raise RunError(
            f"no checkpoint of {checkpoints.folder.show(checkpoints.folder.root)} is intact; none was "
            "deleted."
        )
    if keep_best:
        others = _without_best(checkpoints, kept, others)
    intact = [each for each in (*kept, *others) if each.state == "intact"]
    milestones = of_every(every_epochs, [each.checkpoint for each in intact if each.checkpoint])
    newest = (
        "the newest intact checkpoint" if keep == 1 else f"the newest {keep} intact checkpoints"
    )
    return {
        status.name: status.problem or f"older than {newest}"
        for status in reversed(others)
        if status.state != "other version" and status.name not in milestones
    }


def _without_best(
    checkpoints: Checkpoints, kept: list[CheckpointStatus], others: list[CheckpointStatus]
) -> list[CheckpointStatus]:
    """Return `others` without the best checkpoint, if it is among them and its content is intact."""
    while best := best_name([*kept, *others]):
        if best in {status.name for status in kept}:
            break
        place = [status.name for status in others].index(best)
        others[place] = inspect_checkpoint(checkpoints, others[place].name, is_thorough=True)
        if others[place].state == "intact":
            return others[:place] + others[place + 1 :]
    return others
