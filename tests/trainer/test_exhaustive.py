"""A choice that the code does not know is an error, never another choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_run import GOAL
from torch import nn
from training import open_folder, small_config

from trainyard_trainer.boosting.workers import make_trainer
from trainyard_trainer.checkpointing.checkpoint import Checkpoints, SavedCheckpoint
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import CommandConfig
from trainyard_trainer.engine.learning.optimizers import Precision, build_optimizer, learning_rate
from trainyard_trainer.engine.worker import shards_of
from trainyard_trainer.on_ray.worker import batches_of_loader
from trainyard_trainer.parallel.strategy import strategy_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.measurements.progress import Trained
from trainyard_trainer.user_code.command import command_of

CPU = torch.device("cpu")
END_OF_EPOCH = SavedCheckpoint(
    name="c",
    trained=Trained(epoch=1, steps_in_epoch=0),
    config={},
    data={},
    goal=GOAL,
    files={},
)


class Unknown(Section):
    """An optimizer and a schedule that nobody has implemented."""

    name: str = "unknown"
    learning_rate: float = 0.1
    warmup_samples: int = 0


def changed(tmp_path: Path, **train: Any) -> Any:
    """A config whose `train` section was not validated, as after adding a choice to the model alone."""
    config = small_config(tmp_path)
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


CHOICES: dict[str, Callable[[Path], Any]] = {
    "optimizer": lambda path: build_optimizer(
        nn.Linear(1, 1).parameters(), changed(path, optimizer=Unknown()).train, CPU
    ),
    "schedule": lambda path: learning_rate(changed(path, schedule=Unknown()).train, 0, 10),
    "precision": lambda path: Precision.of("fp8", CPU),  # type: ignore[arg-type]
    "strategy": lambda path: strategy_of(
        changed(path, strategy="unknown").train, None, lambda network: []
    ),
    "shards": lambda path: shards_of(
        changed(path, strategy="unknown"), Checkpoints(open_folder(small_config(path)))
    ),
    "loader": lambda path: batches_of_loader("unknown"),  # type: ignore[arg-type]
    "library": lambda path: make_trainer(boosting_task(changed(path, library="unknown"))),
    "way to start a command": lambda path: command_of(
        CommandConfig.model_construct(
            name="r", command=("true",), run_with="unknown", **small_sections(path)
        ),
        1,
    ),
}


def small_sections(tmp_path: Path) -> dict[str, Any]:
    """The sections of a config that each kind of run has."""
    config = small_config(tmp_path)
    return {"scaling": config.scaling, "storage": config.storage}


def boosting_task(config: Any) -> Any:
    """What `make_trainer` reads of a task."""

    class Task:
        def __init__(self) -> None:
            self.config = config

    return Task()


@pytest.mark.parametrize("choice", CHOICES)
def test_an_unknown_choice_is_an_error(tmp_path: Path, choice: str) -> None:
    with pytest.raises(AssertionError, match="Expected code to be unreachable"):
        CHOICES[choice](tmp_path)


def test_an_unknown_recipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="unknown"):
        recipe_of(changed(tmp_path, recipe="unknown"))
