"""Resume a run: check that the config is compatible, choose a checkpoint, and remove what is newer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
    SavedCheckpoint,
)
from trainyard_trainer.config.trainer_config import RecipeConfig
from trainyard_trainer.config.training.identity import LENGTHS, identity_of
from trainyard_trainer.config.training.train import has_fixed_workers
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.names import CheckpointName
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Reached, Trained, read_lines, to_json
from trainyard_trainer.run_folder.ownership.fence import Fence

if TYPE_CHECKING:
    import torch

    from trainyard_trainer.run_folder.measurements.startup import Startup


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The state from which a worker group starts: a checkpoint, or nothing."""

    name: str | None = None
    """The name of the checkpoint; None if training starts from scratch."""
    trained: Trained = field(default_factory=Trained)
    weights: dict[str, torch.Tensor] | None = None
    """The weights; None if there is no checkpoint, or if it is sharded."""
    state: dict[str, Any] | None = None
    is_from_memory: bool = False
    """Whether the state is in the memory of the nodes, newer than that of the checkpoint."""

    @classmethod
    def of(cls, folder: RunFolder, name: str | None) -> Start:
        """Read the checkpoint that `begin` has chosen. Each worker calls this method."""
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
    folder: RunFolder,
    config: RecipeConfig,
    fence: Fence,
    say: Callable[[str], None],
    *,
    began: float,
    workers: int,
    kept: Trained | None = None,
) -> Start:
    """Choose where to start from, remove everything newer from the folder, and return it without its state.

    That is the newest checkpoint, unless the state up to `kept` in the memory of the nodes is newer.

    Only rank 0 of a worker group that is not fenced may call this function. It removes uncommitted and
    damaged checkpoints, those that an older group wrote after a newer one had started, and the metrics of
    steps that will be repeated. The group has so many workers, and its start began at `began` by time.time().
    """
    checkpoints = Checkpoints(folder)
    found = choose(folder, say)
    if found:
        refuse_other(found, config)
    for name in checkpoints.names():
        is_newer = not found or CheckpointName.require(name) > CheckpointName.require(found.name)
        if is_newer or not checkpoints.is_committed(name):
            checkpoints.delete(name)
    saved = found.trained if found else Trained()
    is_from_memory = kept is not None and kept.samples > saved.samples
    trained = kept if kept and is_from_memory else saved
    record = {
        "attempt": fence.attempt,
        "group": fence.group,
        "samples": trained.samples,
        "step": trained.step,
        "seconds": {name: round(value, 3) for name, value in trained.seconds.items()},
        **Reached.by(folder, trained).to_json(),
        "workers": workers,
        "is_from_memory": is_from_memory,
        "began": round(began, 3),
        "time": round(time.time(), 3),
    }
    cut_metrics(folder, trained)
    folder.append(folder.starts, json.dumps(record) + "\n")
    return Start(name=found.name if found else None, trained=trained, is_from_memory=is_from_memory)


def take_over(folder: RunFolder, fence: Fence) -> None:
    """Remove the checkpoint that the lost rank 0 of this worker group has not committed, if there is one."""
    fence.check()
    checkpoints = Checkpoints(folder)
    for name in checkpoints.names():
        if not checkpoints.is_committed(name):
            checkpoints.delete(name)


def note_started(folder: RunFolder, fence: Fence, startup: Startup) -> None:
    """Record that the worker group has made its first step, and the times of its start."""
    starts = read_lines(folder, folder.starts)
    mine = [
        each for each in starts if (each["attempt"], each["group"]) == (fence.attempt, fence.group)
    ]
    assert startup.loop_began is not None
    told = {"loop_began": round(startup.loop_began, 3), "startup": startup.to_json()}
    folder.append(folder.starts, json.dumps(mine[0] | told) + "\n")


def note_replacement(
    folder: RunFolder,
    fence: Fence,
    trained: Trained,
    ranks: Sequence[int],
    began: float,
) -> float:
    """Record that the workers of some ranks were replaced, while the others kept their state.

    `began` is the time.time() at which the loss was noticed. Returns the seconds since then.
    """
    seconds = time.time() - began
    record = {
        "attempt": fence.attempt,
        "group": fence.group,
        "step": trained.step,
        "time": round(began, 3),
        "ranks": list(ranks),
        "seconds": round(seconds, 3),
    }
    folder.append(folder.replacements, json.dumps(record) + "\n")
    return seconds


def choose(
    folder: RunFolder, say: Callable[[str], None] = lambda line: None
) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint that is not overtaken; None if there is none."""
    starts = read_lines(folder, folder.starts)
    return Checkpoints(folder).newest(say, lambda name: why_overtaken(name, starts))


def descended(folder: RunFolder) -> list[SavedCheckpoint]:
    """Return the committed checkpoints that are not overtaken, newest first."""
    starts = read_lines(folder, folder.starts)
    there = Checkpoints(folder).committed()
    return [checkpoint for checkpoint in there if not why_overtaken(checkpoint.name, starts)]


def why_overtaken(checkpoint: str, starts: list[dict[str, Any]]) -> str | None:
    """Return why a checkpoint is overtaken, or None if it is not.

    A checkpoint is overtaken if a later worker group has started from an earlier point.
    """
    name = CheckpointName.require(checkpoint)
    for start in starts:
        is_later = (start["attempt"], start["group"]) > (name.attempt, name.group)
        if is_later and start["samples"] < name.samples:
            return (
                f"attempt {name.attempt} wrote it, but attempt {start['attempt']} resumed from "
                f"{start['samples']} samples"
            )
    return None


def cut_metrics(folder: RunFolder, trained: Trained) -> None:
    """Remove the records of metrics.jsonl of what will be repeated: steps, and the end of an epoch."""
    if not folder.exists(folder.metrics):
        return
    before = read_lines(folder, folder.metrics)
    kept = [
        record
        for record in before
        if record["samples"] <= trained.samples
        and (record["kind"] != "epoch" or record["epoch"] <= trained.epoch)
    ]
    folder.write(folder.metrics, "".join(to_json(record) + "\n" for record in kept))


def check_identity(folder: RunFolder, config: RecipeConfig) -> None:
    """Raise ConfigError if the folder belongs to a run whose config defines another model."""
    if folder.exists(folder.run):
        _refuse(json.loads(folder.read(folder.run)), config, f"{folder.show(folder.root)}")


def refuse_other(checkpoint: SavedCheckpoint, config: RecipeConfig) -> None:
    """Raise ConfigError if the checkpoint belongs to a run whose config defines another model."""
    _refuse(checkpoint.config, config, f"checkpoint {checkpoint.name}")


def _refuse(before: dict[str, Any], config: RecipeConfig, where: str) -> None:
    now = config.model_dump(mode="json")
    changes = differences(identity_of(before), identity_of(now))
    remedy = "Give this run another name (--name), or set the old folder aside (--fresh)."
    workers, wanted = (each["scaling"]["num_workers"] for each in (before, now))
    if workers != wanted and all(has_fixed_workers(each["train"]) for each in (before, now)):
        changes.append(
            f"scaling.num_workers: {workers} -> {wanted} "
            f"(checkpoints of {now['train']['strategy']} can be loaded only by the same number of workers)"
        )
        remedy = f"Use {workers} workers. {remedy}"
    for key in before["train"].keys() & now["train"].keys() & set(LENGTHS):
        old, new = before["train"][key], now["train"][key]
        if old > new:
            changes.append(f"train.{key}: {old} -> {new} (it can only be increased)")
    if changes:
        raise ConfigError(
            f"run {config.name} already exists in {where} with a different config:\n"
            + "".join(f"       {change}\n" for change in changes)
            + f"       {remedy}"
        )


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Return one line for each value that differs, such as `train.model.name: resnet18 -> resnet34`."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(before.keys() | now.keys())
            for line in differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{path}: {before} -> {now}"]
