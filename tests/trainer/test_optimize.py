"""How weights follow gradients: learning rate, optimiser, precision, and the average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import small_config

from trainyard_trainer.config.training.train import Train
from trainyard_trainer.engine.learning.optimizers import (
    Precision,
    WeightAverage,
    build_optimizer,
    learning_rate,
)
from trainyard_trainer.errors import ConfigError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")

TOTAL = 10_000
"""Samples of the whole run."""


def train(schedule: dict[str, Any], optimizer: dict[str, Any] | None = None) -> Train:
    """Steps of 100 samples with 0.1 at the highest."""
    wanted = optimizer or {"name": "sgd", "learning_rate": 0.1}
    return small_config(
        Path("/unused"),
        train__schedule=schedule,
        train__optimizer=wanted,
        train__global_batch_size=100,
    ).train


# Learning rate.


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"name": "cosine"}, {0: 0.1, 2500: 0.0853553, 5000: 0.05, 7500: 0.0146447, TOTAL: 0.0}),
        ({"name": "cosine", "final_share": 0.1}, {0: 0.1, 5000: 0.055, TOTAL: 0.01}),
        # After the warm-up, half a cosine over the 8,000 samples that are left.
        ({"name": "cosine", "warmup_samples": 2000}, {2000: 0.1, 6000: 0.05, TOTAL: 0.0}),
        ({"name": "constant"}, {0: 0.1, 5000: 0.1, TOTAL: 0.1}),
        (
            {"name": "step", "every_samples": 3000, "factor": 0.5},
            {0: 0.1, 2900: 0.1, 3000: 0.05, 5900: 0.05, 6000: 0.025, 9000: 0.0125},
        ),
        # (100 + 0) / (900 + 100) of the highest in the first step, all of it once the warm-up is over.
        (
            {"name": "constant", "warmup_samples": 900},
            {0: 0.01, 100: 0.02, 400: 0.05, 800: 0.09, 900: 0.1, 1000: 0.1},
        ),
        ({"name": "step", "every_samples": 500, "warmup_samples": 900}, {400: 0.05, 1000: 0.001}),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    schedule: dict[str, Any], rates: dict[int, float]
) -> None:
    found = {samples: learning_rate(train(schedule), samples, TOTAL) for samples in rates}
    assert found == pytest.approx(rates, abs=1e-7)


@pytest.mark.parametrize("warmup_samples", [1, 99, 100, 101, 1000, 1234])
@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_warm_up_rises_to_the_highest_rate_and_no_further(name: str, warmup_samples: int) -> None:
    rule = train({"name": name, "warmup_samples": warmup_samples})
    rates = [learning_rate(rule, samples, TOTAL) for samples in range(0, TOTAL, 100)]
    rising = rates[: -(-warmup_samples // 100) + 1]
    assert rising == sorted(rising)
    assert rising[0] > 0
    assert max(rates) <= 0.1
    assert learning_rate(rule, warmup_samples, TOTAL) == 0.1


def test_a_warm_up_longer_than_the_run_is_all_there_is() -> None:
    rule = train({"name": "cosine", "warmup_samples": 10 * TOTAL})
    assert learning_rate(rule, TOTAL - 100, TOTAL) == pytest.approx(
        0.1 * TOTAL / (10 * TOTAL + 100)
    )
    assert learning_rate(rule, 10 * TOTAL, TOTAL) == 0.1


# Optimisers.

SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.8, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("wanted", "kind", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01}),
        (ADAMW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize(("device", "is_fused"), [("cpu", True), ("cuda", True), ("meta", False)])
def test_an_optimiser_is_as_asked_and_fused_where_the_device_can(
    wanted: dict[str, Any], kind: type, settings: dict[str, Any], device: str, is_fused: bool
) -> None:
    optimizer = build_optimizer(
        nn.Linear(2, 2).parameters(), train({"name": "cosine"}, wanted), torch.device(device)
    )
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert group.items() >= (settings | {"fused": is_fused}).items()


@pytest.mark.parametrize("wanted", [SGD, ADAMW])
def test_a_fused_optimiser_does_what_the_plain_one_does(wanted: dict[str, Any]) -> None:
    weights = []
    for device in (CPU, torch.device("meta")):
        torch.manual_seed(0)
        network = nn.Linear(20, 10)
        optimizer = build_optimizer(network.parameters(), train({"name": "cosine"}, wanted), device)
        for _ in range(5):
            optimizer.zero_grad()
            network(torch.randn(8, 20)).square().sum().backward()
            optimizer.step()
        weights.append(network.weight)
    assert torch.allclose(*weights, atol=1e-5)


# Precision.


def test_auto_is_float32_on_a_cpu() -> None:
    found = Precision.of("auto", CPU)
    assert (found.name, found.dtype, found.is_scaled, found.is_tf32) == ("fp32", None, False, False)


@pytest.mark.parametrize("wanted", ["fp16", "tf32"])
def test_what_needs_a_gpu_is_refused_on_a_cpu(wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wanted} needs a GPU.* Use auto or fp32"):
        Precision.of(wanted, CPU)


def test_bf16_is_allowed_on_a_cpu() -> None:
    found = Precision.of("bf16", CPU)
    assert (found.dtype, found.is_scaled) == (torch.bfloat16, False)
    with found.autocast(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("has_bf16", "wanted", "name", "dtype", "is_scaled", "is_tf32"),
    [
        (True, "auto", "bf16", torch.bfloat16, False, True),
        (False, "auto", "fp32", None, False, False),
        (True, "fp32", "fp32", None, False, False),
        (True, "tf32", "tf32", None, False, True),
        (True, "fp16", "fp16", torch.float16, True, True),
    ],
)
def test_a_gpu_computes_in_what_was_asked(
    monkeypatch: pytest.MonkeyPatch,
    has_bf16: bool,
    wanted: str,
    name: str,
    dtype: torch.dtype | None,
    is_scaled: bool,
    is_tf32: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    found = Precision.of(wanted, CUDA)
    assert found == Precision(name=name, dtype=dtype, is_scaled=is_scaled, is_tf32=is_tf32)


def test_plain_float32_is_computed_as_float32() -> None:
    Precision.of("bf16", CPU).set_for_process()
    assert torch.get_float32_matmul_precision() == "high"
    Precision.of("fp32", CPU).set_for_process()
    assert torch.get_float32_matmul_precision() == "highest"
    with Precision.of("fp32", CPU).autocast(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


# The average of the weights.


@pytest.mark.parametrize("decay", [0.2, 0.9])
def test_the_average_keeps_more_of_itself_from_update_to_update_up_to_its_decay(
    decay: float,
) -> None:
    network = nn.Linear(3, 2)
    average = WeightAverage(network, decay)
    expected = 0.0
    for updates in range(9):
        value = updates**2 + 1.0
        nn.init.constant_(network.weight, value)
        average.update(network)
        kept = min(decay, (1 + updates) / (10 + updates)) if updates else 0.0
        expected = kept * expected + (1 - kept) * value
        assert average.network.weight.flatten().tolist() == pytest.approx([expected] * 6, rel=1e-5)


class NetworkOfManyTypes(nn.Module):
    """Weights and buffers of several data types, as a model with batch norm and rotary positions has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.half = nn.Linear(5, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 2)
        self.register_buffer("rotation", torch.randn(6, dtype=torch.complex64))
        self.register_buffer("table", torch.arange(200))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool), persistent=False)

    def change(self) -> None:
        """Change all weights and floating-point buffers, as a training step does."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.add_(torch.randn_like(tensor))
        self.norm.num_batches_tracked += 1


def average_of_torch(network: nn.Module, decay: float) -> AveragedModel:
    """Return torch's average, with a decay that grows as that of WeightAverage does."""

    def update(averages: Any, currents: Any, num_averaged: Any) -> None:
        kept = min(decay, (1 + int(num_averaged)) / (10 + int(num_averaged)))
        get_ema_multi_avg_fn(kept)(averages, currents, num_averaged)

    return AveragedModel(network, multi_avg_fn=update, use_buffers=True)


def test_the_average_has_the_bits_of_that_of_torch() -> None:
    torch.manual_seed(0)
    network = NetworkOfManyTypes()
    average, expected = WeightAverage(network, 0.5), average_of_torch(network, 0.5)
    for _ in range(20):
        network.change()
        average.update(network)
        expected.update_parameters(network)
        ours, theirs = average.network.state_dict(), expected.module.state_dict()
        compared = [name for name, each in ours.items() if each.dtype != torch.int64]
        assert len(compared) == 9
        for name in compared:
            assert torch.equal(ours[name], theirs[name]), name


def test_integers_and_booleans_are_copied_and_not_averaged() -> None:
    network = NetworkOfManyTypes()
    average = WeightAverage(network, 0.9)
    for _ in range(5):
        network.change()
        network.mask.logical_not_()
        average.update(network)
        assert average.network.norm.num_batches_tracked == network.norm.num_batches_tracked
        # torch's AveragedModel rounds averages of integers down, also of equal ones.
        assert torch.equal(average.network.table, torch.arange(200))
        assert torch.equal(average.network.mask, network.mask)


def test_an_average_goes_on_from_its_state() -> None:
    network = nn.Linear(3, 2)
    whole, cut = WeightAverage(network, 0.9), WeightAverage(network, 0.9)
    for number in range(4):
        if number == 2:
            resumed = WeightAverage(nn.Linear(3, 2), 0.9)
            resumed.network.load_state_dict(cut.network.state_dict())
            resumed.updates = cut.updates
            cut = resumed
        nn.init.constant_(network.weight, float(number))
        whole.update(network)
        cut.update(network)
    assert torch.equal(whole.network.weight, cut.network.weight)


@pytest.mark.parametrize("optimizer", [{"name": "sgd"}, {"name": "adamw"}])
def test_gradients_that_overflow_in_the_first_step_leave_nothing_behind(
    optimizer: dict[str, Any],
) -> None:
    train = small_config(Path("/unused"), train__precision="fp16", train__optimizer=optimizer).train
    weight = nn.Parameter(torch.ones(1000))
    mover = build_optimizer([weight], train, torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu")
    for factor in (torch.inf, 1.0, 1.0):
        mover.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(mover)
        scaler.update()
    assert 0 < (1 - weight).max() < 1
    assert len(weight.unique()) == 1
