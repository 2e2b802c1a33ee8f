"""What a run has saved, for those who use it afterwards: its folder, and a model with all it needs."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from trainer.checkpoint import MODEL, STATE, Checkpoint, Checkpoints, Damaged, best_of
from trainer.config import Model
from trainer.data.parquet import Images
from trainer.errors import ConfigError, RunError
from trainer.folder import RunFolder, open_filesystem
from trainer.model import build_model

DELIVERED, LAST, BEST = "delivered", "last", "best"
"""Words that stand for a checkpoint's name; the first one for the run's model.pt."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """The arguments of `open_run`, for the command line of a tool."""
    parser.add_argument("run", help="the run's name, or its folder's path with a slash in it")
    parser.add_argument("--storage", default="runs", help="where the folders of runs lie")
    parser.add_argument("--endpoint", help="address of an S3 server that is not AWS")


def open_run(run: str, storage: str, endpoint: str | None) -> RunFolder:
    """The folder of a run that is there: named below the storage, or by a path with a slash in it.

    Raises ConfigError.
    """
    is_path = "/" in run
    folder = (
        RunFolder(*open_filesystem(run, endpoint))
        if is_path
        else RunFolder.open(storage, run, endpoint)
    )
    if folder.exists(folder.checkpoints) or folder.exists(folder.model):
        return folder
    if folder.exists(folder.root):
        raise ConfigError(f"{folder.show(folder.root)} holds neither checkpoints nor a model.")
    above, _, name = folder.root.rpartition("/")
    others = folder.subfolders(above)
    raise ConfigError(
        f"there is no run {name} in {folder.show(above)}.\n       "
        + (f"There are {', '.join(others)}." if others else "Name its storage with --storage DIR.")
    )


def delivered_name(folder: RunFolder) -> str | None:
    """The checkpoint whose weights are the run's model.pt."""
    if not folder.exists(folder.model_facts):
        return None
    name: str = json.loads(folder.read(folder.model_facts))["checkpoint"]
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A model with its weights, and what is known of them."""

    facts: dict[str, Any]
    """What `facts_of` says."""
    weights: dict[str, torch.Tensor]

    @property
    def config(self) -> Model:
        return Model.model_validate(self.facts["model"])

    @property
    def images(self) -> Images:
        known = self.facts["images"]
        return Images(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})

    def build(self) -> nn.Module:
        """The network, ready to be asked."""
        network = build_model(self.config)
        network.load_state_dict(self.weights)
        return network.eval()


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What whoever uses a model must know: its network, its classes, and how images become its input."""
    images, trained = checkpoint.images, checkpoint.trained
    model = checkpoint.config["train"]["model"]
    channels, rows, columns = images["shape"]
    side = model["image_size"]
    return {
        "run": checkpoint.config["name"],
        "checkpoint": checkpoint.name,
        "weights": "moving average" if checkpoint.config["train"]["ema_decay"] else "trained",
        "model": model,
        "images": images,
        "input": {"shape": [None, channels, side, side], "dtype": "float32"},
        "preprocessing": [
            f"decode to 8 bits and {channels} channel{'s' if channels > 1 else ''}",
            f"resize to cover {rows} x {columns} and crop the centre to it",
            "divide by 255, subtract images.mean and divide by images.spread, per channel",
            f"resize to {side} x {side}: bilinear, with antialiasing",
        ],
        "trained": {
            name: value
            for name, value in asdict(trained).items()
            if name in ("epoch", "step", "samples", "val_loss", "val_accuracy")
        },
    }


def read_saved(folder: RunFolder, which: str) -> Saved:
    """The model that a run has delivered, or that of a checkpoint. Raises TrainerError."""
    if which == DELIVERED:
        return _delivered(folder)
    checkpoints = Checkpoints(folder)
    try:
        checkpoint = checkpoints.check(_name_of(checkpoints, which))
    except Damaged as reason:
        raise RunError(
            f"checkpoint {which} of {folder.show(folder.root)} cannot be used: {reason}.\n"
            "       `trainyard checkpoints ls` shows what there is."
        ) from None
    return Saved(facts=facts_of(checkpoint), weights=_weights(checkpoints, checkpoint))


def deliver(folder: RunFolder, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
    """Make a checkpoint's model the run's own: model.pt, and model.json with what is known of it."""
    if checkpoint.config["train"]["ema_decay"]:
        with folder.writing(folder.model) as stream:
            torch.save(_weights(checkpoints, checkpoint), stream)
    else:
        folder.copy(checkpoints.path(checkpoint.name, MODEL), folder.model)
    folder.write(folder.model_facts, json.dumps(facts_of(checkpoint), indent=2))


def _weights(checkpoints: Checkpoints, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Those that were validated: their moving average, where the run has one."""
    if not checkpoint.config["train"]["ema_decay"]:
        return checkpoints.load(checkpoint.name, MODEL)
    average = checkpoints.load(checkpoint.name, STATE)["learner"]["average"]
    return {
        name.removeprefix("module."): weight
        for name, weight in average.items()
        if name.startswith("module.")
    }


def _delivered(folder: RunFolder) -> Saved:
    try:
        facts = json.loads(folder.read(folder.model_facts))
        weights = folder.read(folder.model)
    except FileNotFoundError:
        raise RunError(
            f"{folder.show(folder.root)} has not delivered a model yet: model.pt is missing.\n"
            "       Use --checkpoint last, or train the run to its end."
        ) from None
    return Saved(
        facts=facts,
        weights=torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True),
    )


def _name_of(checkpoints: Checkpoints, which: str) -> str:
    """Raises RunError if there is no such checkpoint."""
    if which == LAST:
        found = checkpoints.newest()
    elif which == BEST:
        there = checkpoints.committed()
        found = best_of(there, there[0].config["checkpoint"]["best"]) if there else None
    elif which in checkpoints.names():
        return which
    else:
        found = None
    if found is None:
        raise ConfigError(
            f"--checkpoint = {which}: there is none in "
            f"{checkpoints.folder.show(checkpoints.folder.checkpoints)}.\n"
            f"       Use {DELIVERED}, {LAST}, {BEST}, or a name that `trainyard checkpoints ls` shows."
        )
    return found.name
