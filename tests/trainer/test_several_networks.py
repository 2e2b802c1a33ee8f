"""Recipes whose networks are trained in turn, by an optimizer each."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from own_recipes import EXAMPLES, own_config
from torch import nn
from training import open_folder, same, train_here

from trainyard_trainer import Batch, Loss, Metric, Recipe
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check, try_own_recipe
from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.data.loading.batch import BatchRequest
from trainyard_trainer.data.loading.user_dataset import UserDataset, UserRows
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, read_lines

SGD = {"name": "sgd", "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.0}
ADAM = {"name": "adamw", "learning_rate": 0.003, "weight_decay": 0.0}
POINTS = {"num_train": 128, "num_valid": 32}


@pytest.fixture(autouse=True)
def _importable(code: Path) -> None:
    """The recipes of the examples can be imported."""


def gan_config(storage: Path, **changes: Any) -> OwnRecipeConfig:
    return own_config(storage, "gan", options=POINTS, **changes)


def steps_of(config: OwnRecipeConfig, count: int) -> tuple[Learner, Iterator[Batch]]:
    """A learner, and the batches of its first steps: the first samples of the data set in order."""
    data = open_data(config, open_folder(config))
    learner = Learner(
        config, data, Length.of(config, data.num_train), Worker(device=torch.device("cpu"))
    )
    assert isinstance(data, UserDataset)
    rows = UserRows(data, "train", seed=0, collate=learner.recipe.collate)
    starts = range(0, count * 32, 32)
    batches = (rows[BatchRequest(np.arange(start, start + 32), 0)] for start in starts)
    return learner, batches


def by_hand(networks: dict[str, nn.Module], batches: Iterator[Batch], recipe: Any) -> None:
    """Train a GAN as tutorials do: a step of one network, with the other's output detached, in turn."""
    generator, discriminator = networks["generator"], networks["discriminator"]
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.02, momentum=0.9)
    of_discriminator = torch.optim.AdamW(discriminator.parameters(), lr=0.003, weight_decay=0.0)
    entropy = nn.BCEWithLogitsLoss()
    for batch in batches:
        noise = recipe.augment(batch, seed=0, epoch=0)["noise"]
        real, drawn = discriminator(batch["point"]), discriminator(generator(noise).detach())
        of_discriminator.zero_grad()
        (entropy(real, torch.ones_like(real)) + entropy(drawn, torch.zeros_like(drawn))).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        seen = discriminator(generator(noise))
        entropy(seen, torch.ones_like(seen)).backward()
        of_generator.step()


def test_steps_are_those_of_a_loop_with_two_optimizers(tmp_path: Path) -> None:
    config = gan_config(
        tmp_path, optimizer=ADAM, optimizers={"generator": SGD}, schedule={"name": "constant"}
    )
    learner, batches = steps_of(config, 4)
    other, again = steps_of(config, 4)
    for step, batch in enumerate(batches):
        learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=step)
    by_hand(dict(other.network.named_children()), again, other.recipe)
    for one, two in zip(learner.network.parameters(), other.network.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.ci
def test_the_generator_learns_to_draw_what_the_discriminator_calls_real(tmp_path: Path) -> None:
    settings = yaml.safe_load((EXAMPLES.parent / "gan.yaml").read_text())["train"]
    config = own_config(tmp_path, "gan", **settings)
    try_all(config)
    train_here(config)
    folder = open_folder(config)
    records = [each for each in read_lines(folder, folder.metrics) if each["kind"] == "epoch"]
    assert records[-1]["val_distance"] < 0.3 * records[0]["val_distance"]
    assert {"loss", "generator_loss", "val_loss", "val_generator_loss"} <= records[-1].keys()


def test_a_loaded_state_goes_on_with_the_optimizers_of_all_networks(tmp_path: Path) -> None:
    learner, batches = steps_of(gan_config(tmp_path), 4)
    learner.step(next(batches), learner.new_sums(), epoch=0, step_in_epoch=0)
    other, _ = steps_of(gan_config(tmp_path), 4)
    state = deepcopy((learner.weights(), learner.state()))
    other.load(*state)
    for step, batch in enumerate(batches, start=1):
        for each in (learner, other):
            each.step(batch, each.new_sums(), epoch=0, step_in_epoch=step)
    assert same(learner.weights(), other.weights())


class Pair(Recipe):
    """Two networks that learn from a third one, which is not trained."""

    networks = ("first", "second")
    metrics = (Metric(name="size", direction="lower", description="size of the output"),)

    def build_model(self) -> nn.Module:
        parts = {name: nn.Linear(2, 1) for name in ("teacher", "second", "first")}
        parts["teacher"].requires_grad_(False)
        return nn.ModuleDict(parts)

    def network_loss(self, network: str, models: Any, batch: Batch) -> Loss:
        wanted, found = models["teacher"](batch["point"]), models[network](batch["point"])
        metrics = {"size": (found.abs().sum(), len(batch))} if network == "second" else {}
        return Loss(sum=((found - wanted) ** 2).sum(), weight=len(batch), metrics=metrics)


class LeavesOneOut(Pair):
    networks = ("second",)


class Unknown(Pair):
    networks = ("first", "second", "third")


class WrongNetwork(Pair):
    """Computes the loss of another network than it is asked for."""

    def network_loss(self, network: str, models: Any, batch: Batch) -> Loss:
        return super().network_loss(network, {**models, "second": models["first"]}, batch)


class Twice(Pair):
    """Has the metric in the losses of both networks."""

    def network_loss(self, network: str, models: Any, batch: Batch) -> Loss:
        found = super().network_loss(network, models, batch)
        return replace(found, metrics={"size": (found.sum.detach(), len(batch))})


class Mean(Pair):
    def network_loss(self, network: str, models: Any, batch: Batch) -> Loss:
        found = super().network_loss(network, models, batch)
        return replace(found, sum=found.sum / len(batch)) if network == "second" else found


class OwnScale(Pair):
    """Has a parameter that belongs to none of the networks."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))
        return model


class NoNetworkLoss(Recipe):
    networks = ("first",)

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"first": nn.Linear(2, 1)})


def pair_config(storage: Path, recipe: type[Recipe], **changes: Any) -> OwnRecipeConfig:
    reference = f"{recipe.__module__}:{recipe.__name__}"
    return gan_config(storage, recipe=reference, **changes)


def try_all(config: OwnRecipeConfig) -> None:
    """Do what an attempt and its workers do before the first step."""
    check(config)
    data = open_data(config, open_folder(config))
    try_own_recipe(config, data)
    Learner(config, data, Length.of(config, data.num_train), Worker(device=torch.device("cpu")))


def test_a_network_that_is_not_trained_can_teach_the_others(tmp_path: Path) -> None:
    config = pair_config(tmp_path, Pair)
    try_all(config)
    learner, batches = steps_of(config, 1)
    before = deepcopy(learner.weights())
    learner.step(next(batches), learner.new_sums(), epoch=0, step_in_epoch=0)
    after = learner.weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("teacher")}


@pytest.mark.parametrize(
    ("recipe", "changes", "problem"),
    [
        (NoNetworkLoss, {}, r"has no method network_loss\(self, network, models, batch\)"),
        (Unknown, {}, "has 'third', and the model .* the children teacher, second, first"),
        (LeavesOneOut, {}, "leaves out 2 parameters of the model, such as first.weight"),
        (
            WrongNetwork,
            {},
            "backward pass of its network_loss of 'second' failed",
        ),
        (Twice, {}, r"the metrics \['size', 'size'\], and the class declares \['size'\]"),
        (Mean, {}, "network_loss of 'second'.*is a mean"),
        (Pair, {"optimizers": {"thirds": ADAM}}, "train.optimizers has 'thirds', .*first, second"),
        (OwnScale, {"strategy": "fsdp2"}, "with the parameters scale beside its networks"),
        (Pair, {"strategy": "deepspeed"}, "has one model and one optimizer. Use .*: fsdp2, or ddp"),
    ],
)
def test_networks_that_do_not_fit_are_refused(
    tmp_path: Path, recipe: type[Recipe], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        try_all(pair_config(tmp_path, recipe, **changes))


def test_optimizers_of_networks_are_refused_for_a_recipe_with_one(tmp_path: Path) -> None:
    config = own_config(tmp_path, "regression", optimizers={"generator": ADAM})
    with pytest.raises(ConfigError, match="the recipe trains its model with one optimizer"):
        check(config)
