"""Whole runs on a CUDA GPU: exact resume after a kill, prediction, lack of memory."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.gpu_runs import (
    CUDA_ONLY,
    SLOW_ON_CPU,
    assert_same_bits,
    image_run,
    own_run,
    text_run,
    train,
)
from trainyard_trainer.config.trainer_config import (
    TrainerConfig,
)
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.recipes.saved_model import DELIVERED, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import read_lines
from trainyard_trainer.tools.prediction.classifier import Classifier
from trainyard_trainer.tools.prediction.own_prediction import predict_split


@SLOW_ON_CPU
@pytest.mark.parametrize(
    ("run", "settings"),
    [
        pytest.param(image_run, {"ema_decay": 0.9}, id="images"),
        pytest.param(text_run, {}, id="text"),
        pytest.param(text_run, {"strategy": "fsdp2"}, id="text-fsdp2"),
        pytest.param(text_run, {"precision": "bf16"}, id="text-bf16"),
        pytest.param(own_run, {"precision": "bf16", "micro_batch_size": 8}, id="own-recipe"),
        pytest.param(own_run, {"strategy": "fsdp2"}, id="own-recipe-fsdp2"),
    ],
)
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, device: torch.device, run: Any, settings: dict[str, Any]
) -> None:
    """With PyTorch's deterministic algorithms, without which two runs of CUDA differ in any case."""
    whole, killed = (run(tmp_path, device, name, **settings) for name in ("whole", "killed"))
    assert_same_after_kill(whole, killed)


@CUDA_ONLY
@pytest.mark.parametrize(
    ("run", "settings"),
    [
        pytest.param(image_run, {"precision": "fp16", "clip_norm": 1.0}, id="images-fp16"),
        pytest.param(text_run, {"compile": True}, id="text-compiled"),
    ],
)
@pytest.mark.timeout(600)
def test_a_killed_run_with_what_only_a_gpu_has_goes_on_to_the_same_bits(
    tmp_path: Path, device: torch.device, run: Any, settings: dict[str, Any]
) -> None:
    assert_same_after_kill(
        *(run(tmp_path, device, name, **settings) for name in ("whole", "killed"))
    )


def assert_same_after_kill(whole: TrainerConfig, killed: TrainerConfig) -> None:
    """Train one run, kill the other and resume it, and compare their weights and losses."""
    done = train(whole, "--deterministic")
    assert done.returncode == 0, done.stdout + done.stderr
    first = train(killed, "--deterministic", "--kill-from-step=8")
    assert first.returncode == -signal.SIGKILL, first.stdout + first.stderr
    second = train(killed, "--deterministic")
    assert second.returncode == 0, second.stdout + second.stderr

    folders = [RunFolder.open(each.storage.path, each.name) for each in (whole, killed)]
    summary = json.loads(folders[1].read(folders[1].summary))
    assert summary["attempts"] == 2
    assert summary["resumed_from"]
    weights = [
        torch.load(Path(folder.model), map_location="cpu", weights_only=True) for folder in folders
    ]
    assert_same_bits(*weights)
    losses = [
        [line["loss"] for line in read_lines(folder, folder.metrics) if line["kind"] == "epoch"]
        for folder in folders
    ]
    assert losses[0] == losses[1]


# After training.


@SLOW_ON_CPU
@pytest.mark.timeout(600)
def test_predictions_on_the_device_are_those_of_the_cpu(
    tmp_path: Path, device: torch.device, images: Prepared
) -> None:
    config, own = image_run(tmp_path, device, "images"), own_run(tmp_path, device, "own")
    for each in (config, own):
        done = train(each)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder.open(config.storage.path, config.name)
    pixels = LocalCopy(images, images.valid)[np.arange(16)]["image"].numpy()
    here, there = (
        Classifier(read_saved(folder, DELIVERED), each)(pixels, 1)
        for each in (torch.device("cpu"), device)
    )
    assert [labels for ((labels, _),) in here] == [labels for ((labels, _),) in there]

    folder = RunFolder.open(own.storage.path, own.name)
    tables = [
        predict_split(
            folder,
            read_saved(folder, DELIVERED, trusts_code=True),
            "valid",
            batch_size=32,
            device=each,
        )
        for each in (torch.device("cpu"), device)
    ]
    assert tables[0].equals(tables[1])
    assert tables[0].num_rows == 80


# Too little memory.


@CUDA_ONLY
def test_a_run_that_exceeds_the_gpus_memory_names_the_numbers_and_the_remedies(
    tmp_path: Path, device: torch.device
) -> None:
    model = {"name": "resnet18", "in_channels": 1, "num_classes": 10, "image_size": 224}
    config = image_run(tmp_path, device, "large", model=model, global_batch_size=256)
    done = train(config, "--memory-gib=1")
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: CUDA out of memory") :]
    name = torch.cuda.get_device_name(device)
    assert f"of GPU 0 ({name})" in error
    assert "computes 256 of its 256 samples per step at once" in error
    assert "PyTorch reports: CUDA out of memory. Tried to allocate" in error
    assert "train.micro_batch_size: 128" in error
    assert "train.precision: bf16" in error
    assert "Traceback" not in error
