"""Configs of runs with the recipes of `examples/recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard_trainer.config.trainer_config import OwnRecipeConfig

EXAMPLES = Path(__file__).parents[2] / "examples/recipes"

DATA = {
    "regression": "Patients",
    "segmentation": "Shapes",
    "autoencoder": "Digits",
    "two_tower": "Pairs",
    "gan": "Ring",
}
CLASSES = {
    "regression": "Regression",
    "segmentation": "Segmentation",
    "autoencoder": "Autoencoder",
    "two_tower": "TwoTower",
    "gan": "Gan",
}


def own_config(
    storage: Path, example: str = "regression", *, workers: int = 1, **changes: Any
) -> OwnRecipeConfig:
    """The config of an example's recipe; `recipe`, `dataset` and keys of `train` can be changed."""
    data = {"dataset": f"{example}:{DATA[example]}"}
    for key in ("dataset", "options", "drop_last"):
        if key in changes:
            data[key] = changes.pop(key)
    train = {
        "recipe": f"{example}:{CLASSES[example]}",
        "epochs": 2,
        "global_batch_size": 32,
        "optimizer": {"name": "adamw", "learning_rate": 0.005},
    }
    return OwnRecipeConfig.model_validate(
        {
            "name": "own",
            "data": data,
            "train": train | changes,
            "scaling": {"num_workers": workers, "use_gpu": False, "cpus_per_worker": 1},
            "storage": {"path": str(storage)},
        }
    )
