"""Find out which checkpoints of a run are intact, which one is the best, and which ones may be deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pyarrow import fs

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
    Damaged,
    SavedCheckpoint,
)
from trainyard_trainer.checkpointing.resume import why_overtaken
from trainyard_trainer.checkpointing.retention import best_of, of_every
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder.progress import Trained, read_lines
from trainyard_trainer.terminal import Bar

State = Literal["intact", "damaged", "overtaken", "uncommitted", "other version"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStatus:
    """A checkpoint, and whether it can be used."""

    name: str
    state: State
    problem: str | None = None
    checkpoint: SavedCheckpoint | None = None
    """What its manifest says, where that can be read."""


def inspect_checkpoint(
    checkpoints: Checkpoints, name: str, *, is_thorough: bool
) -> CheckpointStatus:
    """By its manifest and the sizes of its files, or by all its bytes."""
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
    except RunError as reason:
        return CheckpointStatus(name=name, state="other version", problem=str(reason))
    return CheckpointStatus(name=name, state="intact", checkpoint=checkpoint)


def newest_name(newest_first: list[CheckpointStatus]) -> str | None:
    """The newest that is intact."""
    return next((each.name for each in newest_first if each.state == "intact"), None)


def best_name(newest_first: list[CheckpointStatus]) -> str | None:
    """The best of the intact ones, by the rule of the newest one's config."""
    intact = [each.checkpoint for each in newest_first if each.state == "intact"]
    there = [checkpoint for checkpoint in intact if checkpoint]
    best = best_of(there, there[0].config["checkpoint"]["best"]) if there else None
    return best.name if best else None


def bytes_of(checkpoints: Checkpoints, name: str) -> int:
    """What it takes on the storage, committed or not."""
    selector = fs.FileSelector(checkpoints.path(name), recursive=True, allow_not_found=True)
    infos = checkpoints.folder.filesystem.get_file_info(selector)
    return sum(info.size for info in infos if info.type == fs.FileType.File)


def result_of(trained: Trained | None) -> dict[str, Any]:
    """How far a checkpoint came, and what validation said of it."""
    # In mid-epoch the manifest repeats the last validation, which was of other weights.
    validated = trained if trained and trained.steps_in_epoch == 0 else None
    return {
        "epoch": trained.epoch if trained else None,
        "step": trained.step if trained else None,
        "samples": trained.samples if trained else None,
        "val_accuracy": validated.val_accuracy if validated else None,
        "val_loss": validated.val_loss if validated else None,
    }


def going_of(
    checkpoints: Checkpoints, *, keep: int, keep_best: bool, every_epochs: int | None
) -> dict[str, str]:
    """Names to delete, the oldest first, each with its reason.

    What stays instead has been read and compared. Raises RunError if no checkpoint is intact.
    """
    kept: list[CheckpointStatus] = []
    others: list[CheckpointStatus] = []
    for name in checkpoints.names():
        judged = inspect_checkpoint(checkpoints, name, is_thorough=len(kept) < keep)
        (kept if judged.state == "intact" and len(kept) < keep else others).append(judged)
    if not kept:
        raise RunError(
            f"no checkpoint of {checkpoints.folder.show(checkpoints.folder.root)} is intact: "
            "nothing is deleted."
        )
    if keep_best:
        others = _without_best(checkpoints, kept, others)
    intact = [each for each in (*kept, *others) if each.state == "intact"]
    milestones = of_every(every_epochs, [each.checkpoint for each in intact if each.checkpoint])
    newest = "the newest intact one" if keep == 1 else f"the newest {keep} intact ones"
    return {
        judged.name: judged.problem or f"older than {newest}"
        for judged in reversed(others)
        if judged.state != "other version" and judged.name not in milestones
    }


def _without_best(
    checkpoints: Checkpoints, kept: list[CheckpointStatus], others: list[CheckpointStatus]
) -> list[CheckpointStatus]:
    """The others without the best of all, if that is among them and its bytes are right, too."""
    while best := best_name([*kept, *others]):
        if best in {judged.name for judged in kept}:
            break
        place = [judged.name for judged in others].index(best)
        others[place] = inspect_checkpoint(checkpoints, others[place].name, is_thorough=True)
        if others[place].state == "intact":
            return others[:place] + others[place + 1 :]
    return others
