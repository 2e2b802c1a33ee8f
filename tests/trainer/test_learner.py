"""One step and one validation: what each setting of the recipe does to them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from training import read_split, same, small_config, task_of

from trainyard_trainer.checkpointing.saver import on_host
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.chunks import copied
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.engine.learning.learner import Learner, seed_generators
from trainyard_trainer.engine.learning.sums import Validation
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.image_classification.recipe import Classification
from trainyard_trainer.run_folder.measurements.progress import Length

CPU = torch.device("cpu")
PLAIN_SGD = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
CONSTANT = {"name": "constant"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As a worker of one CPU has: several would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return task_of(small_config(tmp_path_factory.mktemp("digits"))).data


@pytest.fixture(scope="module")
def batch(digits: Prepared) -> Batch:
    """128 digits."""
    images = decode(read_split(digits).slice(0, 128), digits.info)
    return copied(images, np.arange(128), is_pinned=False)


def learner_of(digits: Prepared, *, device: torch.device = CPU, **changes: Any) -> Learner:
    config = small_config(Path("/unused"), **changes)
    length = Length.of(config, digits.num_train)
    return Learner(config, digits, length, Worker(device=device))


def step(learner: Learner, batch: Batch, number: int = 0) -> float:
    """Make a step; returns its loss."""
    sums = learner.new_sums()
    learner.step(batch, sums, epoch=0, step_in_epoch=number)
    loss, _ = sums.since_last()
    return loss


def weights(learner: Learner) -> torch.Tensor:
    return nn.utils.parameters_to_vector(learner.network.parameters()).detach().clone()


def moved_by(learner: Learner, batch: Batch) -> float:
    """How far one step moves the weights."""
    before = weights(learner)
    step(learner, batch)
    return (weights(learner) - before).norm().item()


# The loss.


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_that_of_smoothed_labels(
    digits: Prepared, batch: Batch, smoothing: float
) -> None:
    learner = learner_of(digits, train__label_smoothing=smoothing)
    learner.network.eval()
    outputs = learner.network(Classification.inputs(learner.recipe, batch))
    # So much of each label is spread over all ten classes.
    labels = functional.one_hot(batch["label"], 10) * (1 - smoothing) + smoothing / 10
    expected = -(labels * outputs.log_softmax(dim=1)).sum(dim=1).mean()
    assert step(learner, batch) == pytest.approx(expected.item(), rel=1e-5)


# The step.


def test_a_long_gradient_is_shortened_and_a_short_one_is_not(
    digits: Prepared, batch: Batch
) -> None:
    settings = {"train__optimizer": PLAIN_SGD, "train__schedule": CONSTANT}
    free = moved_by(learner_of(digits, **settings), batch)
    assert free > 0.5
    shortened = moved_by(learner_of(digits, train__clip_norm=0.5, **settings), batch)
    assert shortened == pytest.approx(0.5, rel=1e-3)
    unchanged = moved_by(learner_of(digits, train__clip_norm=2 * free, **settings), batch)
    assert unchanged == pytest.approx(free, rel=1e-3)


def test_a_step_goes_at_the_rate_of_its_schedule(digits: Prepared, batch: Batch) -> None:
    learner = learner_of(
        digits,
        train__schedule={"name": "constant", "warmup_samples": 128 * 9},
        train__optimizer=PLAIN_SGD,
    )
    rates = [
        learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=number)
        for number in range(10)
    ]
    assert rates == pytest.approx([0.1 * number for number in range(1, 11)])
    assert learner.optimizers[0].param_groups[0]["lr"] == 1.0


def test_channels_last_changes_no_result(digits: Prepared, batch: Batch) -> None:
    plain = learner_of(digits)
    last = learner_of(digits, train__channels_last=True)
    first = next(module for module in last.network.modules() if isinstance(module, nn.Conv2d))
    assert first.weight.is_contiguous(memory_format=torch.channels_last)
    for learner in (plain, last):
        # Batch norm over so small feature maps makes much of the last digits.
        learner.network.eval()
    for number in range(3):
        assert step(last, batch, number) == pytest.approx(step(plain, batch, number), rel=1e-6)
    assert torch.allclose(weights(plain), weights(last), atol=1e-6)


def test_what_a_model_draws_follows_from_the_step_alone(digits: Prepared, batch: Batch) -> None:
    # With dropout, which differs from step to step.
    settings = {"train__model__name": "mobilenet_v3_small", "train__model__image_size": 32}
    first, again = learner_of(digits, **settings), learner_of(digits, **settings)
    torch.rand(100)
    assert step(first, batch, 3) == step(again, batch, 3)
    other = learner_of(digits, **settings)
    assert step(other, batch, 4) != step(learner_of(digits, **settings), batch, 3)


def test_each_seed_step_and_rank_draws_its_own_numbers() -> None:
    def drawn(seed: int, samples: int, rank: int) -> float:
        seed_generators(CPU, seed, samples, rank)
        return torch.rand(()).item()

    places = [(0, 0, 0), (0, 0, 1), (0, 128, 0), (1, 0, 0), (2**32 - 1, 10**9, 1000)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert drawn(*places[1]) == drawn(*places[1])


def test_a_weight_that_is_no_number_is_found(digits: Prepared) -> None:
    learner = learner_of(digits)
    assert learner.is_finite()
    with torch.no_grad():
        next(learner.network.parameters()).view(-1)[0] = float("inf")
    assert not learner.is_finite()


# Validation.


def test_a_validation_uses_what_batch_norm_has_learnt_and_leaves_the_model_training(
    digits: Prepared, batch: Batch
) -> None:
    learner = learner_of(digits)
    step(learner, batch)
    before = {key: value.clone() for key, value in learner.network.state_dict().items()}
    whole, parts = learner.validate([batch]), learner.validate(parts_of(batch, 7))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert (parts.num_samples, parts.details["confusion"]) == (128, whole.details["confusion"])
    # Some processors round a product differently for another number of rows.
    assert confidences(parts) == pytest.approx(confidences(whole), rel=1e-5)
    assert learner.network.training
    assert same(learner.network.state_dict(), before)


def confidences(validation: Validation) -> list[float]:
    """Return the confidences of the worst predictions, the largest first."""
    return [each["confidence"] for each in validation.details["worst"]]


def parts_of(batch: Batch, size: int) -> list[Batch]:
    return [batch.rows(start, start + size) for start in range(0, len(batch), size)]


def test_with_an_average_it_is_the_average_that_is_validated(
    digits: Prepared, batch: Batch
) -> None:
    learner = learner_of(digits, train__ema_decay=0.5)
    for number in range(3):
        step(learner, batch, number)
    assert learner.average
    validation = learner.validate([batch])
    with torch.no_grad():
        for parameter in learner.network.parameters():
            parameter.zero_()
    assert learner.validate([batch]).loss == validation.loss
    assert learner.delivered() is learner.average.network


# What a checkpoint brings back.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__optimizer": {"name": "adamw"}, "train__ema_decay": 0.9},
        {"train__channels_last": True},
        {"train__precision": "bf16"},
    ],
)
def test_a_learner_goes_on_from_its_state(
    digits: Prepared, batch: Batch, changes: dict[str, Any]
) -> None:
    whole = learner_of(digits, **changes)
    for number in range(2):
        step(whole, batch, number)
    saved = on_host({"weights": whole.network.state_dict(), "state": whole.state()})
    resumed = learner_of(digits, **changes)
    resumed.load(saved["weights"], saved["state"])
    for number in range(2, 4):
        assert step(resumed, batch, number) == step(whole, batch, number)
    assert same(resumed.network.state_dict(), whole.network.state_dict())
    if whole.average and resumed.average:
        assert resumed.average.updates == whole.average.updates == 4
        assert same(resumed.average.network.state_dict(), whole.average.network.state_dict())


# Precision and compilation.


def losses_of(learner: Learner, batch: Batch, steps: int) -> list[float]:
    return [step(learner, batch, number) for number in range(steps)]


def test_bf16_learns_what_fp32_learns(digits: Prepared, batch: Batch) -> None:
    part = parts_of(batch, 32)[0]
    settings = {"train__optimizer": {"name": "adamw", "learning_rate": 0.003}}
    plain = losses_of(learner_of(digits, train__precision="fp32", **settings), part, 6)
    found = losses_of(learner_of(digits, train__precision="bf16", **settings), part, 6)
    assert found[0] != plain[0]
    assert found[0] == pytest.approx(plain[0], rel=0.02)
    for losses in (plain, found):
        assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_a_compiled_model_learns_what_the_plain_one_learns(digits: Prepared, batch: Batch) -> None:
    # A network of few layers, which are what is compiled.
    settings = {"train__model__name": "alexnet", "train__model__image_size": 64}
    part = parts_of(batch, 16)[0]
    plain, compiled = (
        learner_of(digits, **settings),
        learner_of(digits, train__compile=True, **settings),
    )
    for learner in (plain, compiled):
        learner.network.eval()
    assert losses_of(compiled, part, 4) == pytest.approx(losses_of(plain, part, 4), rel=1e-3)
    assert compiled.validate([part]).loss == pytest.approx(plain.validate([part]).loss, rel=1e-3)
    # Saved under the names of the plain one, which may go on from there.
    saved = compiled.network.state_dict()
    assert saved.keys() == plain.network.state_dict().keys()
    plain.load(saved, compiled.state())
    assert plain.validate([part]).loss == compiled.validate([part]).loss


@pytest.fixture
def _compiler() -> None:
    """What torch.compile needs on a CPU. Skips without it; in CI that is a failure."""
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        return
    message = "torch.compile needs a C++ compiler on a CPU: g++ or clang++"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
