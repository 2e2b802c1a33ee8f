"""Where a run goes on: what may have changed since, which checkpoint holds, what must go."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trainer.checkpoint import Checkpoint, Checkpoints
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.folder import RunFolder
from trainer.progress import read_lines, to_json


def begin(folder: RunFolder, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to start from, in a folder that is put back to that moment.

    What a crash left behind is removed: checkpoints that are not intact and newer than this one, or
    never committed, and metrics of steps that will be trained again. One process of a run calls it.
    """
    checkpoints = Checkpoints(folder)
    start = checkpoints.newest(say)
    names = checkpoints.names()
    newer = names[: names.index(start.name)] if start else names
    for name in newer:
        checkpoints.delete(name)
    for name in names[len(newer) :]:
        if not checkpoints.is_committed(name):
            checkpoints.delete(name)
    cut_metrics(folder, start.trained.samples if start else 0)
    return start


def cut_metrics(folder: RunFolder, samples: int) -> None:
    """Keep the lines of metrics.jsonl up to so many samples: later ones will come again."""
    if not folder.exists(folder.metrics):
        return
    before = read_lines(folder, folder.metrics)
    kept = [record for record in before if record["samples"] <= samples]
    folder.write(folder.metrics, "".join(to_json(record) + "\n" for record in kept))


def check_identity(folder: RunFolder, config: TrainerConfig) -> None:
    """Raises ConfigError if the folder belongs to a run that learns something else."""
    if not folder.exists(folder.run):
        return
    before = json.loads(folder.read(folder.run))
    now = config.model_dump(mode="json")
    changes = differences(_identity(before), _identity(now))
    if before["train"]["epochs"] > now["train"]["epochs"]:
        changes.append(
            f"train.epochs: {before['train']['epochs']} -> {now['train']['epochs']} "
            "(it may only be raised)"
        )
    if changes:
        raise ConfigError(
            f"the run {config.name} exists in {folder.show(folder.root)} and is another one:\n"
            + "".join(f"       {change}\n" for change in changes)
            + "       Give this one another name (--name), or remove the old folder."
        )


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the weights that come out; the rest of a config may change between attempts."""
    train = {key: value for key, value in config["train"].items() if key != "epochs"}
    return {"data": config["data"], "train": train}


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """One line for each value that differs: `train.model.name: resnet18 -> resnet34`."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(before.keys() | now.keys())
            for line in differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{path}: {before} -> {now}"]
