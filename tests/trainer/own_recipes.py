"""Configs of runs with the recipes of `examples/recipes`."""

from __future__ import annotations

import hashlib
import io
import tarfile
from base64 import b64encode
from pathlib import Path
from typing import Any

from training import open_folder

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, OwnRecipeConfig
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.measurements.startup import Startup

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


def packed(folder: Path) -> tuple[str, dict[str, str]]:
    """Pack code as the launcher does: its SHA-256, and the variable that carries it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for file in sorted(folder.glob("*.py")):
            archive.add(file, arcname=file.name)
    content = stream.getvalue()
    return hashlib.sha256(content).hexdigest(), {CODE_VARIABLE: b64encode(content).decode()}


def task_of_code(code: Path, config: OwnRecipeConfig) -> TrainingTask:
    """The task of a run, for processes that have its code from the run's folder alone."""
    sha256, environment = packed(code)
    config = config.model_copy(update={"code_sha256": sha256})
    folder = open_folder(config)
    code_archive.store(folder, sha256, environment)
    data = open_data(config, folder)
    return TrainingTask(config=config, data=data, attempt=1, startup=Startup(began=0.0))
