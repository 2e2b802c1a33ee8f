"""FSDP2 shards each network of a recipe that trains several in turn: the training is that of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_recipes import own_config
from torch.distributed.tensor import DTensor
from training import gloo_worker, metrics, open_folder, run_processes, same, train_as_rank

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.recipes.saved_model import LAST, read_saved
from trainyard_trainer.run_folder.measurements.progress import Length

POINTS = {"num_train": 70, "num_valid": 30}
SGD = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9}
ADAM = {"name": "adamw", "learning_rate": 0.001}

CODE = """
from gan import Gan, Ring
from torch import nn

class Units(Gan):
    '''Gathers each layer on its own, and trains with a teacher that no optimizer trains.'''

    def build_model(self):
        model = super().build_model()
        model["teacher"] = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        model["teacher"].requires_grad_(False)
        return model

    def fsdp_modules(self, model):
        return [each for each in model.modules() if isinstance(each, nn.Linear)]

    def network_loss(self, network, models, batch):
        found = super().network_loss(network, models, batch)
        if network == "discriminator":
            return found
        drawn = models["generator"](batch["point"].repeat(1, 2))
        taught = (models["teacher"](drawn) ** 2).sum()
        return type(found)(sum=found.sum + taught, weight=found.weight, metrics=found.metrics)
"""


def sharded_config(storage: Path, strategy: str, workers: int, **changes: Any) -> OwnRecipeConfig:
    train = {
        "strategy": strategy,
        "recipe": "units:Units",
        "optimizer": ADAM,
        "optimizers": {"generator": SGD},
        "schedule": {"name": "constant"},
        "ema_decay": 0.9,
        "clip_norm": 1.0,
        "micro_batch_size": 8,
        "precision": "fp32",
    }
    return own_config(
        storage,
        dataset="units:Ring",
        options=POINTS,
        drop_last=False,
        workers=workers,
        **train | changes,
    )


@pytest.fixture(autouse=True)
def _importable(code: Path) -> None:
    (code / "units.py").write_text(CODE)


def train(config: OwnRecipeConfig, attempt: int = 1) -> None:
    """Train with as many processes as the config says."""
    workers, storage = config.scaling.num_workers, Path(config.storage.path)
    storage.mkdir(exist_ok=True)
    meet = str(storage / f"meet-{attempt}")
    run_processes(train_as_rank, (workers, meet, config, attempt), workers)


def final_weights(config: OwnRecipeConfig) -> dict[str, torch.Tensor]:
    return read_saved(open_folder(config), LAST, trusts_code=True).weights


def losses(config: OwnRecipeConfig) -> list[float]:
    keys = ("loss", "generator_loss", "distance", "val_loss", "val_generator_loss")
    return [record[key] for record in metrics(config, "epoch") for key in keys]


@pytest.mark.ci
def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    sharded, copies = (
        sharded_config(tmp_path / strategy, strategy, 2) for strategy in ("fsdp2", "ddp")
    )
    train(sharded)
    train(copies)
    assert losses(sharded) == pytest.approx(losses(copies), rel=1e-4)
    found, wanted = final_weights(sharded), final_weights(copies)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-5)


def test_each_network_is_sharded_and_so_is_one_that_is_not_trained(tmp_path: Path) -> None:
    config = sharded_config(tmp_path, "fsdp2", 1)
    data = open_data(config, open_folder(config))
    with gloo_worker(0, 1, str(tmp_path / "meet")) as worker:
        learner = Learner(config, data, Length.of(config, data.num_train), worker)
    assert learner.average is not None
    for network in (learner.network, learner.average.network):
        assert {name for name, _ in network.named_children()} == {
            *("generator", "discriminator", "teacher")
        }
        assert all(isinstance(each, DTensor) for each in network.parameters())
    teacher = learner.network.get_submodule("teacher")
    assert not any(each.requires_grad for each in teacher.parameters())


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_run_resumes_with_the_optimizers_of_all_networks(tmp_path: Path, workers: int) -> None:
    """With the same number of workers the bits are the same; with another number, sums have another order."""
    whole = sharded_config(tmp_path / "whole", "fsdp2", 2)
    train(whole)
    cut = sharded_config(tmp_path / "cut", "fsdp2", 2)
    train(cut.model_copy(update={"train": cut.train.model_copy(update={"epochs": 1})}))
    scaling = cut.scaling.model_copy(update={"num_workers": workers})
    train(cut.model_copy(update={"scaling": scaling}), attempt=2)
    found, wanted = final_weights(cut), final_weights(whole)
    if workers == 2:
        assert same(found, wanted)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-5)
