"""Where a run goes on: what may have changed since, which checkpoint holds, what must go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
    SavedCheckpoint,
)
from trainyard_trainer.config.identity import LENGTHS, identity_of
from trainyard_trainer.config.train import has_fixed_workers
from trainyard_trainer.config.trainer_config import RecipeConfig
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.names import CheckpointName
from trainyard_trainer.run_folder.fence import Fence
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import Trained, read_lines, to_json

if TYPE_CHECKING:
    import torch

    from trainyard_trainer.run_folder.startup import Startup


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a worker group starts from."""

    name: str | None = None
    """The checkpoint; None for the seed."""
    trained: Trained = field(default_factory=Trained)
    weights: dict[str, torch.Tensor] | None = None
    """None, too, where each worker has saved its share."""
    state: dict[str, Any] | None = None

    @classmethod
    def of(cls, folder: RunFolder, name: str | None) -> Start:
        """From a checkpoint that `begin` has chosen; each worker reads it."""
        if name is None:
            return cls()
        checkpoints = Checkpoints(folder)
        manifest = checkpoints.read_manifest(name)
        return cls(
            name=name,
            trained=manifest.trained,
            weights=checkpoints.load(name, MODEL) if MODEL in manifest.files else None,
            state=checkpoints.load(name, STATE),
        )


def begin(
    folder: RunFolder, config: RecipeConfig, fence: Fence, say: Callable[[str], None]
) -> str | None:
    """The checkpoint to start from, in a folder that is put back to that moment.

    Rank 0 of a worker group calls it, behind its fence. What came after the checkpoint is removed: what
    was never committed, what is damaged, what an older group wrote after a newer one had begun, and
    metrics of steps that will be trained again.
    """
    checkpoints = Checkpoints(folder)
    start = choose(folder, say)
    if start:
        refuse_other(start, config)
    for name in checkpoints.names():
        is_newer = not start or CheckpointName.require(name) > CheckpointName.require(start.name)
        if is_newer or not checkpoints.is_committed(name):
            checkpoints.delete(name)
    trained = start.trained if start else Trained()
    record = {
        "attempt": fence.attempt,
        "group": fence.group,
        "samples": trained.samples,
        "step": trained.step,
        "reached_step": max(reached_step(folder), trained.step),
        "time": round(time.time(), 3),
    }
    cut_metrics(folder, trained.samples)
    folder.append(folder.starts, json.dumps(record) + "\n")
    return start.name if start else None


def note_started(folder: RunFolder, fence: Fence, startup: Startup) -> None:
    """The worker group has made its first step: its line comes once more, with where the time went."""
    starts = read_lines(folder, folder.starts)
    mine = [
        each for each in starts if (each["attempt"], each["group"]) == (fence.attempt, fence.group)
    ]
    folder.append(folder.starts, json.dumps(mine[0] | {"startup": startup.to_json()}) + "\n")


def reached_step(folder: RunFolder) -> int:
    """The last step that was reported, whether it was saved or not; reports come about every second."""
    steps = [record["step"] for record in read_lines(folder, folder.metrics)]
    if folder.exists(folder.progress):
        steps.append(json.loads(folder.read(folder.progress))["step"])
    return max(steps, default=0)


def choose(
    folder: RunFolder, say: Callable[[str], None] = lambda line: None
) -> SavedCheckpoint | None:
    """The newest intact checkpoint that belongs to the run's one line of descent."""
    starts = read_lines(folder, folder.starts)
    return Checkpoints(folder).newest(say, lambda name: why_overtaken(name, starts))


def descended(folder: RunFolder) -> list[SavedCheckpoint]:
    """The committed checkpoints of the run's one line of descent, newest first."""
    starts = read_lines(folder, folder.starts)
    there = Checkpoints(folder).committed()
    return [checkpoint for checkpoint in there if not why_overtaken(checkpoint.name, starts)]


def why_overtaken(text: str, starts: list[dict[str, Any]]) -> str | None:
    """Why a checkpoint does not belong to the run's line of descent; None if it does."""
    name = CheckpointName.require(text)
    for start in starts:
        is_later = (start["attempt"], start["group"]) > (name.attempt, name.group)
        if is_later and start["samples"] < name.samples:
            return (
                f"attempt {name.attempt} wrote it when attempt {start['attempt']} had gone on from "
                f"{start['samples']} samples"
            )
    return None


def cut_metrics(folder: RunFolder, samples: int) -> None:
    """Keep the lines of metrics.jsonl up to so many samples: later ones will come again."""
    if not folder.exists(folder.metrics):
        return
    before = read_lines(folder, folder.metrics)
    kept = [record for record in before if record["samples"] <= samples]
    folder.write(folder.metrics, "".join(to_json(record) + "\n" for record in kept))


def check_identity(folder: RunFolder, config: RecipeConfig) -> None:
    """Raises ConfigError if the folder belongs to a run that learns something else."""
    if folder.exists(folder.run):
        _refuse(json.loads(folder.read(folder.run)), config, f"{folder.show(folder.root)}")


def refuse_other(checkpoint: SavedCheckpoint, config: RecipeConfig) -> None:
    """Raises ConfigError if the checkpoint is of a run that learns something else."""
    _refuse(checkpoint.config, config, f"checkpoint {checkpoint.name}")


def _refuse(before: dict[str, Any], config: RecipeConfig, where: str) -> None:
    now = config.model_dump(mode="json")
    changes = differences(identity_of(before), identity_of(now))
    remedy = "Give this one another name (--name), or set the old folder aside (--fresh)."
    workers, wanted = (each["scaling"]["num_workers"] for each in (before, now))
    if workers != wanted and all(has_fixed_workers(each["train"]) for each in (before, now)):
        changes.append(
            f"scaling.num_workers: {workers} -> {wanted} "
            f"(checkpoints of {now['train']['strategy']} are for as many workers as have written them)"
        )
        remedy = f"Go on with {workers} workers. {remedy}"
    for key in before["train"].keys() & now["train"].keys() & set(LENGTHS):
        old, new = before["train"][key], now["train"][key]
        if old > new:
            changes.append(f"train.{key}: {old} -> {new} (it may only be raised)")
    if changes:
        raise ConfigError(
            f"the run {config.name} exists in {where} and is another one:\n"
            + "".join(f"       {change}\n" for change in changes)
            + f"       {remedy}"
        )


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """One line for each value that differs: `train.model.name: resnet18 -> resnet34`."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(before.keys() | now.keys())
            for line in differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{path}: {before} -> {now}"]
