"""Runs on a CPU or a CUDA GPU for tests, and the processes that train them without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bench import data
from tests.bench.rounds import ROOT
from tests.gpu import user_recipe
from trainyard_trainer.config.trainer_config import (
    CONFIG_VARIABLE,
    BuiltInConfig,
    OwnRecipeConfig,
    TrainerConfig,
)

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
BOTH = pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
CUDA_ONLY = pytest.mark.parametrize("device", [CUDA], indirect=True)
SLOW_ON_CPU = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA], indirect=True
)

SHUFFLENET = {
    "name": "shufflenet_v2_x0_5",
    "in_channels": 1,
    "num_classes": 10,
    "image_size": 28,
}
GPT = {"layers": 2, "heads": 2, "width": 64, "context_length": 64}
ADAMW = {"name": "adamw", "learning_rate": 0.003}
SGD = {"name": "sgd", "learning_rate": 0.05}


def config_of(
    storage: Path, device: torch.device, source: Path = Path("/made"), **train: Any
) -> TrainerConfig:
    """A run of one worker, in fp32 unless `train` says otherwise."""
    settings = {"model": SHUFFLENET, "epochs": 2, "global_batch_size": 16, "precision": "fp32"}
    return BuiltInConfig.model_validate(
        {
            "name": "cuda",
            "data": {"source": str(source), "decode_workers": 0},
            "train": settings | train,
            "checkpoint": {"every_s": None, "every_samples": 64, "every_epochs": 1000},
            "scaling": {
                "num_workers": 1,
                "use_gpu": device.type == "cuda",
                "cpus_per_worker": 1,
            },
            "storage": {"path": str(storage)},
        }
    )


def image_run(tmp_path: Path, device: torch.device, name: str, **train: Any) -> TrainerConfig:
    return config_of(tmp_path / name, device, data.grey_images(400), **train)


def text_run(tmp_path: Path, device: torch.device, name: str, **train: Any) -> TrainerConfig:
    """A language model on 32,000 random letters, in a file of its own."""
    source = tmp_path / "text"
    source.mkdir(exist_ok=True)
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, 32_000, np.uint8)
    (source / "letters.txt").write_bytes(letters.tobytes())
    settings = {"recipe": "language_model", "model": GPT, "optimizer": ADAMW}
    return config_of(tmp_path / name, device, source, **settings | train)


def own_run(tmp_path: Path, device: torch.device, name: str, **train: Any) -> TrainerConfig:
    """A recipe of a user, with dropout, and a data set that draws its samples anew in each epoch."""
    document = config_of(tmp_path / name, device).model_dump()
    return OwnRecipeConfig.model_validate(
        {key: document[key] for key in ("name", "checkpoint", "scaling", "storage")}
        | {
            "data": {"dataset": user_recipe.DATASET, "decode_workers": 2},
            "train": {
                "recipe": user_recipe.RECIPE,
                "model": GPT | {"dropout": 0.1},
                "epochs": 2,
                "global_batch_size": 16,
                "precision": "fp32",
                "optimizer": ADAMW,
            }
            | train,
        }
    )


def train(config: TrainerConfig, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the training program in a process of its own, as tests/gpu/train.py does."""
    paths = [str(ROOT), str(ROOT / "train_image"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.train", *flags],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            CONFIG_VARIABLE: config.model_dump_json(),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def assert_same_bits(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key])
    else:
        assert one == other
