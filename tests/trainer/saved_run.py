"""A run's folder with checkpoints in it, without training."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import BuiltInConfig, TrainerConfig
from trainyard_trainer.config.training.metric import ValidationGoal
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Trained

IMAGES = DatasetInfo(
    source="digits",
    shape=(1, 8, 8),
    classes=("zero", "one", "two"),
    mean=(0.3,),
    std=(0.4,),
)


GOAL = ValidationGoal("val_accuracy", "higher")


def config_of(**train: Any) -> TrainerConfig:
    return BuiltInConfig.model_validate(
        {
            "name": "small",
            "data": {"source": "digits"},
            "train": {
                "model": {
                    "name": "shufflenet_v2_x0_5",
                    "in_channels": 1,
                    "num_classes": 3,
                    "image_size": 16,
                },
                "epochs": 9,
                "global_batch_size": 10,
                **train,
            },
            "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
            "storage": {"path": "/unused"},
        }
    )


@cache
def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Those of a network whose batch norm has seen images, so that its scores differ."""
    torch.manual_seed(seed)
    network = build_model(config_of().train.model)
    for _ in range(20):
        network(torch.randn(8, 1, 16, 16))
    return network.state_dict()


def save(
    folder: RunFolder,
    epoch: int,
    *,
    steps_in_epoch: int = 0,
    accuracy: float = 0.5,
    weights: dict[str, torch.Tensor] | None = None,
    average: dict[str, torch.Tensor] | None = None,
    config: TrainerConfig | None = None,
) -> str:
    """A checkpoint of 100 samples per epoch."""
    step = epoch * 10 + steps_in_epoch
    trained = Trained(
        epoch=epoch,
        step=step,
        samples=step * 10,
        steps_in_epoch=steps_in_epoch,
        metrics={"val_accuracy": accuracy, "val_loss": 1 - accuracy},
    )
    return Checkpoints(folder).save(
        trained,
        attempt=1,
        group=1,
        contents={
            MODEL: weights or {"weight": torch.full((50,), float(epoch))},
            STATE: {"learner": {"average": average or {}, "average_updates": 9}},
        },
        facts={
            "config": (config or config_of()).model_dump(mode="json"),
            "data": asdict(IMAGES),
            "goal": asdict(GOAL),
        },
    )


def damage(folder: RunFolder, name: str, file: str = MODEL) -> None:
    """Change the file's last byte, which no size tells."""
    path = Checkpoints(folder).path(name, file)
    data = folder.read(path)
    folder.write(path, data[:-1] + bytes([data[-1] ^ 1]))


def open_small(path: Path) -> RunFolder:
    return RunFolder.open(str(path), "small")
