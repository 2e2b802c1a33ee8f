"""The example that fine-tunes a model of timm starts from the weights in a file, its head excepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from own_recipes import EXAMPLES, own_config
from safetensors.torch import save_file
from training import final_weights, open_folder, train_here

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check, check_start, try_own_recipe
from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.measurements.progress import read_lines

timm = pytest.importorskip("timm")

RUN_FILE = yaml.safe_load((EXAMPLES.parent / "timm_finetune.yaml").read_text())
MODEL = "test_resnet"
"""A model of timm with 374,000 weights, whose head has the same name as that of the run file's."""


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Random weights of a model with seven classes, which lie in a file of safetensors."""
    torch.manual_seed(1)
    found: dict[str, torch.Tensor] = timm.create_model(MODEL, num_classes=7).state_dict()
    save_file(found, tmp_path / "model.safetensors")
    return found


def fine_tuning(folder: Path, *, skip: list[str], **model: Any) -> OwnRecipeConfig:
    """The run of the example with a smaller model and smaller images, and the weights of the test."""
    train: dict[str, Any] = dict(RUN_FILE["train"])
    train["model"] = train["model"] | {"name": MODEL} | model
    train["init"] = {"path": str(folder / "model.safetensors"), "skip": skip}
    dataset = RUN_FILE["data"]["dataset"]
    return own_config(folder, dataset=dataset, options={"size": 16}, **train | {"epochs": 2})


def test_the_head_learns_on_the_weights_of_the_file(
    code: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    config = fine_tuning(tmp_path, skip=RUN_FILE["train"]["init"]["skip"], trunk_lr_scale=0)
    folder = open_folder(config)
    check(config)
    check_start(config)
    try_own_recipe(config, open_data(config, folder))
    train_here(config)
    first, last = (each for each in read_lines(folder, folder.metrics) if each["kind"] == "epoch")
    assert last["val_loss"] < first["val_loss"]
    assert last["val_accuracy"] > 0.3  # a tenth are right by chance
    trained = final_weights(config)
    assert trained["fc.weight"].shape == (10, weights["fc.weight"].shape[1])
    trunk = [name for name, each in trained.items() if "fc." not in name and each.dim() > 1]
    assert trunk
    assert all(torch.equal(trained[name], weights[name]) for name in trunk)


def test_a_head_with_another_number_of_classes_is_named(
    code: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    config = fine_tuning(tmp_path, skip=[])
    with pytest.raises(ConfigError) as told:
        check_start(config)
    width = weights["fc.weight"].shape[1]
    assert f"fc.weight (10, {width}) in the model, (7, {width}) in the file" in str(told.value)
    assert "2 tensors have another shape" in str(told.value)
    assert "train.init.skip, such as fc.*" in str(told.value)


def test_the_example_is_short() -> None:
    assert len((EXAMPLES / "timm_finetune.py").read_text().splitlines()) <= 80
