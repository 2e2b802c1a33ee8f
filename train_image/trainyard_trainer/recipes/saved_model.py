"""A model that a run has saved, with all that is needed to use it afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
    Damaged,
    SavedCheckpoint,
)
from trainyard_trainer.checkpointing.files import load_tensors
from trainyard_trainer.checkpointing.inventory import (
    best_name,
    inspect_checkpoint,
    newest_name,
    result_of,
)
from trainyard_trainer.config.training.recipes import BOOSTING, CAUSAL_LM, recipe_named
from trainyard_trainer.data.loading.rows import data_info_of_json
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.recipes.recipe import Recipe
from trainyard_trainer.recipes.registry import saved_recipe
from trainyard_trainer.recipes.trained_weights import load_weights
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.terminal import Bar

DELIVERED, LAST, BEST = "delivered", "last", "best"
"""Words that stand for a checkpoint's name; the first one for the run's model.pt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A model with its weights, and what is known of them."""

    facts: dict[str, Any]
    """What `facts_of` says."""
    weights: dict[str, torch.Tensor]
    is_trusted: bool = True
    """Whether the code of the recipe may be run. That of a user's recipe lies in the run's folder."""

    @property
    def recipe(self) -> Recipe[Any]:
        """The recipe that has trained the model. Raises ConfigError if its code is not trusted."""
        if not self.is_trusted:
            raise ConfigError(
                f"{self.facts['run']} was trained with the recipe {self.facts['recipe']}, whose code lies in "
                "the run's folder.\n"
                "       Add --trust-code to run this code, or trust_code=True in Python, if you trust "
                "everyone who may write to the folder."
            )
        known = self.facts.get("images") or self.facts.get("tokens")
        info = data_info_of_json(known) if known else None
        return saved_recipe(recipe_named(self.facts), self.facts["model"], info)

    @property
    def config(self) -> Any:
        """The section `train.model` of the run that saved the model."""
        return self.recipe.config

    @property
    def info(self) -> DatasetInfo:
        return self.recipe.prepared_info

    def build(self) -> nn.Module:
        """The network, ready to be asked."""
        recipe = self.recipe
        network = recipe.build_model()
        load_weights(recipe, network, self.weights)
        return network.eval()


def facts_of(checkpoint: SavedCheckpoint, *, is_trusted: bool = True) -> dict[str, Any]:
    """What whoever uses a model must know: its network, what it says, and what becomes its input.

    The recipe describes the input, unless its code is not trusted.
    """
    train = checkpoint.config["train"]
    metadata = {"source": checkpoint.data["source"]}
    if is_trusted:
        info = data_info_of_json(checkpoint.data)
        metadata = saved_recipe(train["recipe"], train["model"], info).metadata()
    return {
        "run": checkpoint.config["name"],
        "checkpoint": checkpoint.name,
        "weights": "moving average" if train["ema_decay"] else "trained",
        "recipe": train["recipe"],
        "model": train["model"],
        "code_sha256": checkpoint.config.get("code_sha256"),
        **metadata,
        "trained": result_of(checkpoint.trained),
    }


def read_saved(folder: RunFolder, which: str, *, trusts_code: bool = False) -> Saved:
    """The model that a run has delivered, or that of a checkpoint.

    With `trusts_code` the code of a user's recipe is read from the run's folder, where anyone who may write
    there could have put it. Without it such a model has weights, and no network. Raises TrainerError.
    """
    saved = _read(folder, which, trusts_code)
    model = saved.facts["model"]
    if saved.facts["recipe"] != CAUSAL_LM or model.get("endpoint") is not None:
        return saved
    # Without an endpoint of its own, the model lies on the server of the run's folder.
    known = {**model, "endpoint": folder.endpoint}
    return replace(saved, facts={**saved.facts, "model": known})


def _read(folder: RunFolder, which: str, trusts_code: bool) -> Saved:
    """Read the model as the run has saved it. Raises TrainerError."""
    if which == DELIVERED:
        return _delivered(folder, trusts_code)
    checkpoints = Checkpoints(folder)
    name = _name_of(checkpoints, which)
    if name is None:
        raise ConfigError(
            f"--checkpoint = {which}: there is none in {folder.show(folder.checkpoints)}.\n"
            f"       Use {DELIVERED}, {LAST}, {BEST}, or a name that `trainyard checkpoints ls` shows."
        )
    try:
        with Bar(name, checkpoints.read_manifest(name).bytes) as bar:
            checkpoint = checkpoints.check(name, bar.advance)
    except Damaged as reason:
        raise RunError(
            f"checkpoint {name} of {folder.show(folder.root)} cannot be used: {reason}.\n"
            "       `trainyard checkpoints ls` shows what there is."
        ) from None
    _require_network(checkpoint.config["train"], checkpoint.config["name"])
    is_trusted = _prepare_code(folder, checkpoint.config.get("code_sha256"), trusts_code)
    return Saved(
        facts=facts_of(checkpoint, is_trusted=is_trusted),
        weights=_weights(checkpoints, checkpoint),
        is_trusted=is_trusted,
    )


def _prepare_code(folder: RunFolder, code_sha256: str | None, trusts_code: bool) -> bool:
    """Make the code of a run importable if it is trusted. Return whether the recipe may be used."""
    if code_sha256 is None:
        return True  # It is built in, or installed.
    if trusts_code:
        code_archive.make_importable(folder, code_sha256)
    return trusts_code


def _require_network(train: dict[str, Any], run: str) -> None:
    """Raises ConfigError for trees; `train` names the recipe and the library."""
    if recipe_named(train) == BOOSTING:
        raise ConfigError(
            f"{run} is a run of train.recipe = {BOOSTING}, which has trees and no network: "
            f"{train['library']} itself loads them.\n"
            "       `trainyard cp` copies the file that model.json names. docs/guides/gradient-boosting.md "
            "shows how to use it."
        )


def _name_of(checkpoints: Checkpoints, which: str) -> str | None:
    """None if there is no such checkpoint."""
    names = checkpoints.names()
    if which not in (LAST, BEST):
        return which if which in names else None
    judged = [inspect_checkpoint(checkpoints, name, is_thorough=False) for name in names]
    return best_name(judged) if which == BEST else newest_name(judged)


def deliver(folder: RunFolder, checkpoints: Checkpoints, checkpoint: SavedCheckpoint) -> None:
    """Make a checkpoint's model the run's own: model.pt, and model.json with what is known of it."""
    if MODEL in checkpoint.files and not checkpoint.config["train"]["ema_decay"]:
        folder.copy(checkpoints.path(checkpoint.name, MODEL), folder.model)
    else:
        checkpoints.write(folder.model, _weights(checkpoints, checkpoint))
    folder.write(folder.model_facts, json.dumps(facts_of(checkpoint), indent=2))


def _weights(checkpoints: Checkpoints, checkpoint: SavedCheckpoint) -> dict[str, torch.Tensor]:
    """Those that were validated: their moving average, where the run has one."""
    is_averaged = checkpoint.config["train"]["ema_decay"]
    if MODEL not in checkpoint.files:
        # The imports are here because PyTorch's formats of shards take seconds, which most runs need not pay.
        match checkpoint.config["train"]["strategy"]:
            case "deepspeed":
                from trainyard_trainer.checkpointing import zero

                return zero.whole(checkpoints, checkpoint.name)
            case "fsdp2":
                from trainyard_trainer.checkpointing import shards

                part = "average" if is_averaged else "model"
                return shards.whole(checkpoints, checkpoint.name, part)
            case strategy:
                raise RunError(
                    f"checkpoint {checkpoint.name} has neither {MODEL} nor shards that this version can "
                    f"read: its train.strategy is {strategy}.\n       Use the image that wrote it."
                )
    if not is_averaged:
        return checkpoints.load(checkpoint.name, MODEL)
    average: dict[str, torch.Tensor] = checkpoints.load(checkpoint.name, STATE)["learner"][
        "average"
    ]
    return average


def _delivered(folder: RunFolder, trusts_code: bool) -> Saved:
    try:
        facts = json.loads(folder.read(folder.model_facts))
        _require_network(facts, facts["run"])
        weights = load_tensors(folder, folder.model)
    except FileNotFoundError:
        raise RunError(
            f"{folder.show(folder.root)} has not delivered a model yet: model.pt is missing.\n"
            "       Use --checkpoint last, or train the run to its end."
        ) from None
    is_trusted = _prepare_code(folder, facts.get("code_sha256"), trusts_code)
    return Saved(facts=facts, weights=weights, is_trusted=is_trusted)
