"""Training on a CUDA GPU: precision, compilation, FSDP2, fused optimizers, exact resume, too little memory.

Each test that can also runs on a CPU, in the quick tests; `make gpu` runs those for CUDA. None needs Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.bench import data
from tests.bench.rounds import ROOT
from trainyard_trainer.checkpointing.checkpoint import MODEL, STATE
from trainyard_trainer.checkpointing.saver import on_host
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, BuiltInConfig, TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine.learner import Learner
from trainyard_trainer.engine.optimizers import build_optimizer
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import Length, read_lines

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


def learner_of(images: Prepared, device: torch.device, **train: Any) -> Learner:
    config = config_of(Path("/unused"), device, **{"global_batch_size": 64} | train)
    length = Length.of(config, images.num_train)
    return Learner(config, images, length, Worker(device=device))


def losses_of(learner: Learner, batch: Batch, steps: int) -> list[float]:
    """Train these steps on one batch, and return the loss of each."""
    losses = []
    for number in range(steps):
        loss_sums = learner.new_sums()
        epoch, step = divmod(number, learner.length.steps_per_epoch)
        learner.step(batch, loss_sums, epoch=epoch, step_in_epoch=step)
        losses.append(loss_sums.since_last()[0])
    return losses


# Precision and compilation.


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "fp32"),
        ("cpu", "bf16"),
        *(
            pytest.param("cuda", precision, marks=pytest.mark.gpu)
            for precision in ("fp16", "bf16", "tf32", "fp32")
        ),
    ],
    indirect=["device"],
)
def test_the_loss_falls_in_any_precision(
    images: Prepared, batch: Batch, device: torch.device, precision: str
) -> None:
    learner = learner_of(
        images, device, precision=precision, optimizer=ADAMW, clip_norm=5.0, channels_last=True
    )
    losses = losses_of(learner, batch, 10)
    assert losses[-1] < 0.7 * losses[0]
    assert bool(learner.state()["scaler"]) is (precision == "fp16")


@CUDA_ONLY
def test_a_compiled_model_trains_as_the_plain_one(
    images: Prepared, batch: Batch, device: torch.device
) -> None:
    plain, compiled = (learner_of(images, device, compile=each) for each in (False, True))
    assert losses_of(compiled, batch, 4) == pytest.approx(losses_of(plain, batch, 4), rel=1e-2)
    assert compiled.network.state_dict().keys() == plain.network.state_dict().keys()


# FSDP2.


@BOTH
def test_fsdp2_with_one_worker_trains_as_ddp(
    images: Prepared, batch: Batch, device: torch.device
) -> None:
    ddp, fsdp2 = (
        learner_of(images, device, strategy=each, optimizer=ADAMW) for each in ("ddp", "fsdp2")
    )
    assert losses_of(fsdp2, batch, 4) == pytest.approx(losses_of(ddp, batch, 4), rel=1e-2)


# Fused optimizers.


@BOTH
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_the_optimizer_is_fused_and_does_what_the_plain_one_does(
    device: torch.device, optimizer: dict[str, Any]
) -> None:
    train = config_of(Path("/unused"), device, optimizer=optimizer).train
    weights = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        network = nn.Linear(200, 100).to(device)
        inputs = torch.randn(8, 200).to(device)
        mover = build_optimizer(network.parameters(), train, device)
        (group,) = mover.param_groups
        assert group["fused"]
        if not is_fused:
            group |= {"fused": False, "foreach": False}
        for _ in range(5):
            mover.zero_grad()
            network(inputs).square().sum().backward()
            mover.step()
        weights.append(network.weight.detach().cpu())
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-6)


# Checkpoints and resume.


@BOTH
def test_a_checkpoint_goes_to_host_memory_and_back(
    images: Prepared, batch: Batch, device: torch.device
) -> None:
    learner = learner_of(images, device, optimizer=ADAMW, ema_decay=0.9)
    losses_of(learner, batch, 2)
    saved = on_host({MODEL: learner.network.state_dict(), STATE: learner.state()})
    assert {each.device.type for each in saved[MODEL].values()} == {"cpu"}
    resumed = learner_of(images, device, optimizer=ADAMW, ema_decay=0.9)
    resumed.load(saved[MODEL], saved[STATE])
    for name, value in learner.network.state_dict().items():
        assert torch.equal(resumed.network.state_dict()[name], value), name


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


@SLOW_ON_CPU
@pytest.mark.parametrize(
    ("run", "settings"),
    [
        pytest.param(image_run, {"ema_decay": 0.9}, id="images"),
        pytest.param(text_run, {}, id="text"),
        pytest.param(text_run, {"strategy": "fsdp2"}, id="text-fsdp2"),
        pytest.param(text_run, {"precision": "bf16"}, id="text-bf16"),
    ],
)
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, device: torch.device, run: Any, settings: dict[str, Any]
) -> None:
    """With PyTorch's deterministic algorithms, without which two runs of CUDA differ in any case."""
    whole, killed = (run(tmp_path, device, name, **settings) for name in ("whole", "killed"))
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
