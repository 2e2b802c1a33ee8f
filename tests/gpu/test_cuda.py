"""Training on a CUDA GPU: precision, compilation, FSDP2, fused optimizers, the host and the device.

Each test that can also runs on a CPU, in the quick tests; `make gpu` runs those for CUDA. None needs Ray.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.gpu_runs import (
    ADAMW,
    BOTH,
    CUDA,
    CUDA_ONLY,
    SGD,
    assert_same_bits,
    config_of,
    image_run,
    own_run,
    text_run,
)
from tests.support.measured_memory import measured_peak
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.checkpointing.checkpoint import MODEL, STATE
from trainyard_trainer.checkpointing.saver import on_host
from trainyard_trainer.config.memory.model_memory import worker_memory
from trainyard_trainer.config.memory.model_shape import model_shape
from trainyard_trainer.config.trainer_config import (
    TrainerConfig,
)
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.optimizers import build_optimizer
from trainyard_trainer.hardware import GpuFacts, driver_version, gpu_facts
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained


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
    # Batch norm amplifies differences in rounding from step to step.
    assert losses_of(compiled, batch, 2) == pytest.approx(losses_of(plain, batch, 2), rel=1e-2)
    assert compiled.network.state_dict().keys() == plain.network.state_dict().keys()


# Memory.


@CUDA_ONLY
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"gradient_checkpointing": True},
        {"adapter": {"kind": "lora"}},
        {"adapter": {"kind": "lora", "dropout": 0.1}, "gradient_checkpointing": True},
    ],
    ids=["full", "checkpointing", "adapter", "adapter, checkpointing"],
)
def test_the_estimated_memory_of_a_language_model_is_near_the_peak(
    model: dict[str, Any], tmp_path: Path, device: torch.device
) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    train = CausalLm.model_validate(
        {
            "recipe": "causal_lm",
            "model": {"path": str(tmp_path), "init": "random", **model},
            "context_length": 2048,
            "epochs": 1,
            "global_batch_size": 4,
            "precision": "bf16",
        }
    )
    measured = measured_peak(tmp_path, config, train, Worker(device=device))
    estimate = worker_memory(model_shape(config), train, num_workers=1, use_gpu=True)
    assert estimate.total == pytest.approx(measured, rel=0.15), estimate


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


# The host and the device.


def batches_of(config: TrainerConfig, device: torch.device) -> tuple[Learner, Iterator[Batch]]:
    """Return a run's learner, and the batches of its first epoch as its loader makes them."""
    data = open_data(config, RunFolder.open(config.storage.path, config.name))
    length, worker = Length.of(config, data.num_train), Worker(device=device)
    learner = Learner(config, data, length, worker)
    loader = TorchBatches(data, length, Trained(), worker, config, learner.recipe.collate)
    return learner, loader.epoch(0)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize("run", [image_run, text_run, own_run])
def test_the_host_never_waits_for_the_gpu_within_a_step(
    tmp_path: Path, device: torch.device, run: Any
) -> None:
    config = run(tmp_path, device, "run", precision="bf16", clip_norm=1.0, ema_decay=0.9)
    learner, batches = batches_of(config, device)
    sums = learner.new_sums()
    for step, batch in enumerate(batches):
        assert all(batch[name].is_pinned() for name in batch)
        if step == 2:  # the first steps make the state of the optimizer
            torch.cuda.set_sync_debug_mode("error")
        try:
            learner.step(batch, sums, epoch=0, step_in_epoch=step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step == 4:
            break
    assert sums.since_last()[0] > 0


@CUDA_ONLY
def test_the_facts_of_the_gpu_are_those_of_nvidia_smi(device: torch.device) -> None:
    command = ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    name, uuid, driver = done.stdout.splitlines()[0].split(", ")
    assert gpu_facts(device) == GpuFacts(model=name, id=uuid)
    assert driver_version() == driver


@BOTH
def test_a_run_starts_from_the_weights_of_a_file(
    images: Prepared, tmp_path: Path, device: torch.device
) -> None:
    file = tmp_path / "weights.pt"
    before = learner_of(images, device, seed=1).network.state_dict()
    torch.save(before, file)
    after = learner_of(images, device, init={"path": str(file)}).network.state_dict()
    assert_same_bits(after, before)
    assert {each.device.type for each in after.values()} == {device.type}


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
