"""Recipes of the user: the same guarantees, and refusals that name the class, its file and its line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attempts import Attempts, committed, wait_for
from own_recipes import CLASSES, EXAMPLES, own_config, packed
from training import (
    final_weights,
    open_folder,
    run_processes,
    same,
    train_as_rank,
    train_here,
)

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check, try_own_recipe
from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.data.loading.batch import BatchRequest
from trainyard_trainer.data.loading.user_dataset import UserDataset, UserRows, stacked
from trainyard_trainer.errors import ConfigError, DatasetError, RecipeError, RunError
from trainyard_trainer.run_folder.measurements.progress import read_lines


@pytest.mark.parametrize("example", [each for each in CLASSES if each != "gan"])
def test_the_examples_learn(code: Path, tmp_path: Path, example: str) -> None:
    options = (
        {"num_train": 128, "num_valid": 32} if example in ("segmentation", "two_tower") else {}
    )
    config = own_config(tmp_path, example, options=options)
    data = open_data(config, open_folder(config))
    try_own_recipe(config, data)
    assert train_here(config).trained.epoch == 2
    records = read_lines(open_folder(config), open_folder(config).metrics)
    first, last = (record for record in records if record["kind"] == "epoch")
    assert last["loss"] < first["loss"]
    assert last["val_loss"] < first["val_loss"]


@pytest.mark.parametrize("example", CLASSES)
def test_an_example_is_short(example: str) -> None:
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("example", ["regression", "segmentation", "gan"])
@pytest.mark.parametrize("micro_batch_size", [pytest.param(None, marks=pytest.mark.ci), 4])
def test_two_workers_and_small_passes_train_the_weights_of_one_worker(
    code: Path, tmp_path: Path, example: str, micro_batch_size: int | None
) -> None:
    options = {"num_train": 64, "num_valid": 8} if example == "segmentation" else {}
    alone = own_config(tmp_path / "alone", example, options=options, epochs=1)
    train_here(alone)
    several = own_config(
        tmp_path / "several",
        example,
        workers=2,
        options=options,
        epochs=1,
        micro_batch_size=micro_batch_size,
    )
    run_processes(train_as_rank, (2, str(tmp_path / "meet"), several), 2)
    for one, other in zip(
        final_weights(alone).values(), final_weights(several).values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_recipe_of_the_guide_learns(code: Path, tmp_path: Path) -> None:
    guide = (EXAMPLES.parents[1] / "docs/guides/own-model.md").read_text()
    (code / "tabular.py").write_text(guide.split("```python\n")[1].split("```")[0])
    config = own_config(tmp_path, recipe="tabular:Tabular", dataset="tabular:Patients")
    check_all(config)
    assert train_here(config).trained.epoch == 2


@pytest.mark.ci
@pytest.mark.parametrize("example", ["autoencoder", "gan"])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(attempts: Attempts, example: str) -> None:
    sha256, environment = packed(EXAMPLES)
    changes = {"epochs": 10, "drop_last": False}
    whole, killed = (
        own_config(folder, example, **changes).model_copy(update={"code_sha256": sha256})
        for folder in (attempts.storage / "whole", attempts.storage)
    )
    every = killed.checkpoint.model_copy(update={"every_samples": 256})
    killed = killed.model_copy(update={"checkpoint": every})
    attempts.finish(whole, environment=environment, arguments=["--without-ray"])
    process = attempts.start(killed, environment, ["--without-ray"])
    assert wait_for(lambda: len(committed(killed)) > 1, 120)
    assert process.poll() is None
    process.kill()
    process.communicate()
    output = attempts.finish(killed, environment=environment, arguments=["--without-ray"])
    assert "start: checkpoint" in output
    assert same(final_weights(killed), final_weights(whole))


def check_all(config: OwnRecipeConfig) -> None:
    """Do all checks that an attempt makes before it starts workers."""
    check(config)
    try_own_recipe(config, open_data(config, open_folder(config)))


BROKEN = """
import torch
from torch import nn
from torch.nn import functional
from trainyard_trainer import Batch, Loss, Metric, Recipe
from regression import Regression

class NotARecipe:
    pass

class NoLoss(Recipe):
    def build_model(self):
        return nn.Linear(10, 1)

class OtherParameters(Regression):
    def loss(self, model):
        return 0

class Mean(Regression):
    metrics = ()
    def loss(self, model, batch):
        loss = functional.mse_loss(model(batch["features"]).squeeze(1), batch["target"])
        return Loss(sum=loss, weight=len(batch))

class NotALoss(Regression):
    def loss(self, model, batch):
        return model(batch["features"]).sum()

class NoScalar(Regression):
    metrics = ()
    def loss(self, model, batch):
        return Loss(sum=model(batch["features"]), weight=len(batch))

class NotANumber(Regression):
    metrics = ()
    def loss(self, model, batch):
        return Loss(sum=model(batch["features"]).sum() * torch.nan, weight=len(batch))

class NoWeight(Regression):
    metrics = ()
    def loss(self, model, batch):
        return Loss(sum=model(batch["features"]).sum(), weight=1.5)

class OtherColumn(Regression):
    def loss(self, model, batch):
        return model(batch["pixels"])

class OtherShape(Regression):
    def build_model(self):
        return nn.Linear(11, 1)

class NoMetric(Regression):
    def loss(self, model, batch):
        return Loss(sum=model(batch["features"]).sum(), weight=len(batch))

class Unused(Regression):
    metrics = ()
    def build_model(self):
        model = nn.Linear(10, 1)
        model.spare = nn.Parameter(torch.zeros(3))
        return model
    def loss(self, model, batch):
        return Loss(sum=model(batch["features"]).sum(), weight=len(batch))

class OtherWeight(Regression):
    metrics = ()
    def loss(self, model, batch):
        return Loss(sum=model(batch["features"]).sum(), weight=torch.tensor(2))
    def loss_weight(self, batch):
        return torch.tensor(5)

class NoModel(Regression):
    def build_model(self):
        return None
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Missing", "module broken has no Missing"),
        ("NotARecipe", "not a subclass of trainyard_trainer.recipes.Recipe"),
        ("NoLoss", "has no method loss(self, model, batch)"),
        ("OtherParameters", "loss(self, model) has other parameters"),
        ("Mean", "Loss.sum is a mean"),
        ("NotALoss", "loss returned Tensor; it has to return a Loss"),
        ("NoScalar", "sum = (2, 1); it has to be a scalar"),
        ("NotANumber", "sum = nan for the first samples"),
        ("NoWeight", "weight = 1.5; it has to be the number of samples"),
        ("OtherColumn", "features float32 (2, 10)"),
        ("OtherShape", "mat1 and mat2 shapes cannot be multiplied (2x10 and 11x1)"),
        ("NoMetric", "the metrics [], and the class declares ['rmse']"),
        ("Unused", "1 parameters get no gradient: spare"),
        ("OtherWeight", "loss_weight returned 5, and loss the weight 2 for the same batch"),
        ("NoModel", "build_model"),
    ],
)
def test_a_broken_recipe_is_refused_before_workers_start(
    code: Path, tmp_path: Path, name: str, told: str
) -> None:
    (code / "broken.py").write_text(BROKEN)
    config = own_config(tmp_path, recipe=f"broken:{name}")
    with pytest.raises(ConfigError) as refused:
        check_all(config)
    assert told in str(refused.value)
    assert f"broken:{name}" in str(refused.value)


LATE_ERROR = """
from regression import Patients, Regression

class Late(Regression):
    calls = 0

    def METHOD(self, model, batch):
        Late.calls += 1
        if Late.calls > 3:
            ERROR
        return super().METHOD(model, batch)
"""


@pytest.mark.parametrize(
    ("method", "statement", "kind", "told"),
    [
        ("loss", 'batch["nothing"]', RecipeError, "KeyError: 'nothing'"),
        ("evaluate", 'raise ValueError("odd")', RecipeError, "ValueError: odd"),
        ("loss", 'model(batch["features"][:, :3])', RunError, "RuntimeError: mat1 and mat2"),
    ],
)
def test_an_error_in_training_names_file_line_and_method_and_a_mistake_is_final(
    code: Path, tmp_path: Path, method: str, statement: str, kind: type[RunError], told: str
) -> None:
    text = LATE_ERROR.replace("METHOD", method).replace("ERROR", statement)
    (code / "late.py").write_text(text)
    config = own_config(tmp_path, recipe="late:Late", epochs=4)
    with pytest.raises(RunError) as failed:
        train_here(config)
    assert type(failed.value) is kind
    assert str(failed.value).startswith(f"train.recipe = late:Late failed: {told}")
    assert str(failed.value).endswith(f"(late.py, line 10, in {method})")


def test_settings_are_as_strict_as_those_of_a_built_in_recipe(code: Path, tmp_path: Path) -> None:
    config = own_config(tmp_path, model={"width": "32", "wdith": 1})
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert "train.model.width = '32'" in str(refused.value)
    assert "train.model.wdith = 1" in str(refused.value)
    assert "Regression has the settings: width" in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [{"early_stopping": {"metric": "val_accuracy", "patience_epochs": 1}}],
)
def test_a_metric_that_the_recipe_lacks_is_refused(
    code: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = own_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match="val_accuracy is no metric of the recipe: use val_rmse"):
        check(config)


DATASETS = """
import random
import numpy as np
import torch

class Noise:
    def __init__(self, split):
        self.split = split
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.rand(2), "y": np.random.rand(), "z": random.random()}

class Empty(Noise):
    def __len__(self):
        return 0

class Tuples(Noise):
    def __getitem__(self, index):
        return torch.zeros(2), 1

class Ragged(Noise):
    def __getitem__(self, index):
        return {"x": torch.zeros(index + 1)}

class Broken(Noise):
    def __getitem__(self, index):
        return {"x": [1, 2][index]}

def nothing(split):
    return None

def wrong(split):
    raise OSError("no such disk")
"""


@pytest.fixture
def rows(code: Path) -> Callable[[str], UserRows]:
    """A function that opens the training split of a data set of the module `sets`."""
    (code / "sets.py").write_text(DATASETS)

    def open_rows(name: str, seed: int = 0) -> UserRows:
        data = UserDataset(dataset=f"sets:{name}", num_train=8, num_valid=8)
        return UserRows(data, "train", seed=seed, collate=stacked)

    return open_rows


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Missing", "module sets has no Missing"),
        ("Empty", "the split 'train' has no samples"),
        ("Tuples", "a sample is tuple, and has to be a mapping"),
        ("nothing", "returned NoneType, which has no __len__"),
        ("wrong", "OSError: no such disk"),
    ],
)
def test_a_data_set_that_is_none_is_refused(
    rows: Callable[[str], UserRows], name: str, told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        UserDataset.open(f"sets:{name}", {})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("Broken", DatasetError, "sample 2 of 'train' cannot be read"),
        ("Ragged", ConfigError, r"column x has shapes .* override collate"),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(
    rows: Callable[[str], UserRows], name: str, kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        rows(name)[BatchRequest(np.arange(4), 0)]


def test_random_numbers_of_a_sample_follow_from_seed_epoch_and_index_alone(
    rows: Callable[..., UserRows],
) -> None:
    noise = rows("Noise")
    whole = noise[BatchRequest(np.arange(8), epoch=1)]
    part = pickle.loads(pickle.dumps(noise))[BatchRequest(np.array([5]), epoch=1)]
    for name in whole:
        assert torch.equal(whole[name][5:6], part[name])
    others = [
        noise[BatchRequest(np.array([5]), epoch=2)],
        rows("Noise", 1)[BatchRequest(np.array([5]), epoch=1)],
        noise[BatchRequest(np.array([4]), epoch=1)],
    ]
    assert not any(torch.equal(part[name], other[name]) for other in others for name in whole)


def test_an_empty_request_gives_an_empty_batch_with_all_columns(
    rows: Callable[[str], UserRows],
) -> None:
    empty = rows("Noise")[BatchRequest(np.arange(0), 0)]
    assert (len(empty), sorted(empty)) == (0, ["x", "y", "z"])
    assert empty["x"].shape == (0, 2)
