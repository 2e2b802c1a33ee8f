"""What the engine does with a recipe that is not built in: its loss, metrics, groups and details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_language_model import text_config
from torch import Tensor, nn
from torch.nn import functional
from training import (
    ThreadWorker,
    final_weights,
    metrics,
    run_processes,
    small_config,
    task_of,
    train_as_rank,
    train_here,
)

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.metric import Metric
from trainyard_trainer.config.training.models import Gpt, Model
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.loading.rows import read_stand_in
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes import registry
from trainyard_trainer.recipes.language_model.model import Transformer
from trainyard_trainer.recipes.loss import Evaluation, Loss, Top
from trainyard_trainer.recipes.recipe import Forward, Recipe
from trainyard_trainer.run_folder.measurements.progress import Length

CPU = torch.device("cpu")

PLAIN_SGD = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0}

ROUNDED = Metric(name="accuracy", direction="higher", description="share of right predictions")


class Letters(Recipe[Gpt]):
    """Predicts letters, and nothing else: how many there are depends on the text."""

    settings = Gpt
    metrics = (ROUNDED,)

    def build_model(self) -> nn.Module:
        return Transformer(self.config)

    def prepare_options(self) -> dict[str, Any]:
        return {"row_bytes": self.config.context_length + 1}

    def loss(self, model: Forward, batch: Batch) -> Loss:
        rows = batch["text"].long()
        targets = rows[:, 1:]
        is_letter = (targets >= ord("a")) & (targets <= ord("z"))
        scores = model(rows[:, :-1])
        each = functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), reduction="none"
        ).view_as(targets)
        num_letters = is_letter.sum()
        is_right = (scores.argmax(dim=2) == targets) & is_letter
        return Loss(
            sum=(each * is_letter).sum(),
            weight=self.weight_of(batch, num_letters),
            metrics={"accuracy": torch.stack([is_right.sum(), num_letters])},
        )

    def weight_of(self, batch: Batch, num_letters: Tensor) -> Tensor | int:
        return num_letters


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Compute in one thread, as a worker of one CPU does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in which the share of letters differs from row to row."""
    folder = tmp_path_factory.mktemp("letters")
    words = [f"{'word' * (number % 5)} {number * 7919}" for number in range(700)]
    (folder / "a.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Prepared:
    return task_of(text_config(tmp_path_factory.mktemp("rows"), source)).data


def use(monkeypatch: pytest.MonkeyPatch, recipe: type[Recipe[Any]]) -> None:
    """Train this recipe in place of the one for text."""
    monkeypatch.setattr(registry, "RECIPES", {**registry.RECIPES, "language_model": recipe})


def learner_of(rows: Prepared, worker: Worker | None = None, **changes: Any) -> Learner:
    worker = worker or Worker(device=CPU)
    settings = {"train__optimizer": PLAIN_SGD, "train__schedule": {"name": "constant"}}
    workers = {"scaling__num_workers": worker.world_size}
    config = text_config(Path("/unused"), "stdlib", **settings | workers | changes)
    return Learner(config, rows, Length.of(config, rows.num_train), worker)


def batch_of(rows: Prepared, count: int = 64) -> Batch:
    return LocalCopy(rows, rows.train)[np.arange(count)]


def weights(learner: Learner) -> Tensor:
    return nn.utils.parameters_to_vector(learner.network.parameters()).detach().clone()


def expected(rows: Prepared, batch: Batch) -> Tensor:
    """The weights after a step down the gradient of the mean over all letters of the batch."""
    learner = learner_of(rows)
    recipe = Letters(learner.recipe.config, rows.info)
    found = recipe.loss(learner.network, batch)
    (found.sum / found.weight).backward()
    with torch.no_grad():
        for weight in learner.network.parameters():
            assert weight.grad is not None
            weight -= 0.5 * weight.grad
    return weights(learner)


# The weight of a loss.


@pytest.mark.parametrize("micro", [None, 16])
@pytest.mark.parametrize("clip_norm", [None, 1e6])
def test_a_step_follows_the_mean_over_what_the_batch_contains(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch, micro: int | None, clip_norm: float | None
) -> None:
    use(monkeypatch, Letters)
    batch = batch_of(rows)
    learner = learner_of(rows, train__micro_batch_size=micro, train__clip_norm=clip_norm)
    before = weights(learner)
    sums = learner.new_sums()
    learner.step(batch, sums, epoch=0, step_in_epoch=0)
    wanted = expected(rows, batch)
    assert (wanted - before).norm() > 0.01
    torch.testing.assert_close(weights(learner), wanted, rtol=1e-4, atol=1e-6)
    num_letters = ((batch["text"][:, 1:] >= ord("a")) & (batch["text"][:, 1:] <= ord("z"))).sum()
    assert sums.sums[1] == num_letters


def letters_as_rank(rank: int, world_size: int, meeting_point: str, config: TrainerConfig) -> None:
    """Train Letters as one of several processes."""
    registry.RECIPES = {**registry.RECIPES, "language_model": Letters}
    train_as_rank(rank, world_size, meeting_point, config)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole", marks=pytest.mark.ci),
        pytest.param({"train__micro_batch_size": 8}, id="parts"),
    ],
)
def test_two_workers_learn_what_one_learns_whatever_each_of_them_has(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    use(monkeypatch, Letters)
    # The last batch has one row, so that the second worker computes on rows that stand in for none.
    num_train = task_of(text_config(tmp_path / "count", source)).data.num_train
    size = next(size for size in range(32, 200, 16) if num_train % size < 16)
    settings = {
        "train__optimizer": PLAIN_SGD,
        "train__global_batch_size": size,
        "data__drop_last": False,
        **changes,
    }
    alone = text_config(tmp_path / "1", source, **settings)
    train_here(alone)
    two = text_config(tmp_path / "2", source, scaling__num_workers=2, **settings)
    run_processes(letters_as_rank, (2, str(tmp_path / "meet"), two), 2)
    for name, weight in final_weights(alone).items():
        torch.testing.assert_close(final_weights(two)[name], weight, rtol=1e-3, atol=1e-5)
    for key in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert metrics(two, "epoch")[0][key] == pytest.approx(
            metrics(alone, "epoch")[0][key], rel=1e-4
        )


def test_a_batch_without_anything_to_learn_changes_no_weight(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Letters)
    learner = learner_of(rows)
    before = weights(learner)
    batch = batch_of(rows)
    digits = batch.replace(text=torch.full_like(batch["text"], ord("7")))
    learner.step(digits, learner.new_sums(), epoch=0, step_in_epoch=0)
    assert torch.equal(weights(learner), before)


class Uneven(Letters):
    """Returns as a number what depends on the text."""

    def weight_of(self, batch: Batch, num_letters: Tensor) -> Tensor | int:
        return int(num_letters)


class Growing(Letters):
    """Returns another weight for each sample in each batch."""

    calls = 0

    def weight_of(self, batch: Batch, num_letters: Tensor) -> Tensor | int:
        self.calls += 1
        return self.calls * len(batch)


@pytest.mark.parametrize("recipe", [Uneven, Growing])
def test_a_number_as_weight_has_to_be_the_same_for_each_sample(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch, recipe: type[Letters]
) -> None:
    use(monkeypatch, recipe)
    learner, batch = learner_of(rows), batch_of(rows)
    with pytest.raises(ConfigError, match=r"return it as a scalar tensor on the device"):
        take_two_steps(learner, batch)


def take_two_steps(learner: Learner, batch: Batch) -> None:
    for step in range(2):
        learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=step)


# Metrics.


class Wrong(Letters):
    """Returns a loss that does not fit what the recipe declares."""

    change: Mapping[str, Any] = {}

    def loss(self, model: Forward, batch: Batch) -> Loss:
        return replace(super().loss(model, batch), **self.change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"metrics": {}}, "declares the metric accuracy, and its loss has no sums of it"),
        ({"metrics": {"accuracy": torch.ones(3)}}, r"accuracy have the shape \(3,\), .* \(2,\)"),
        ({"metrics": {"accuracy": (1,)}}, r"accuracy have the shape \(1,\)"),
        (
            {"sum": torch.ones(2, requires_grad=True)},
            r"a sum of shape \(2,\); it has to be a scalar",
        ),
    ],
)
def test_a_loss_that_does_not_fit_the_declaration_is_refused(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], problem: str
) -> None:
    use(monkeypatch, Wrong)
    monkeypatch.setattr(Wrong, "change", change)
    learner = learner_of(rows)
    with pytest.raises(ConfigError, match=problem):
        learner.step(batch_of(rows), learner.new_sums(), epoch=0, step_in_epoch=0)


def balanced(sums: Tensor) -> float:
    """The mean over classes of the share of each class that was right."""
    right, count = sums
    return float((right / count.clamp(min=1)).mean())


class PerClass(Letters):
    """Has a metric of two sums for each of three classes."""

    metrics = (
        ROUNDED,
        Metric(
            name="balanced",
            direction="higher",
            description="mean accuracy of the classes",
            shape=(2, 3),
            compute=balanced,
        ),
    )

    def loss(self, model: Forward, batch: Batch) -> Loss:
        found = super().loss(model, batch)
        counts = torch.tensor([[1, 2, 3], [4, 4, 4]], device=batch.ids.device)
        return replace(found, metrics={**found.metrics, "balanced": counts})

    def evaluate(self, model: Forward, batch: Batch) -> Evaluation:
        found = super().evaluate(model, batch)
        rows = torch.stack([batch.ids.double() % 7, batch.ids.double()], dim=1)
        details = {"total": batch["text"].sum(), "highest": Top(rows, 3)}
        return replace(found, details=details)

    def summarize(self, details: Mapping[str, Any]) -> dict[str, Any]:
        return {"total": int(details["total"]), "highest": details["highest"].rows.tolist()}


def test_a_metric_is_any_function_of_sums(rows: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, PerClass)
    learner = learner_of(rows)
    sums = learner.new_sums()
    for step in range(2):
        learner.step(batch_of(rows), sums, epoch=0, step_in_epoch=step)
    assert sums.since_last()[1]["balanced"] == pytest.approx((1 / 4 + 2 / 4 + 3 / 4) / 3)


def test_details_are_those_of_all_batches_and_need_no_batch_of_each_worker(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, PerClass)
    batch = batch_of(rows, 40)
    parts = [batch.rows(start, start + 15) for start in range(0, 60, 15)]
    found = learner_of(rows).validate(parts)
    assert found.num_samples == 40
    total = int(batch["text"].sum())
    assert found.to_json() | {"loss": 0, "accuracy": 0} == {
        "num_samples": 40,
        "loss": 0,
        "accuracy": 0,
        "balanced": found.metrics["balanced"],
        "total": total,
        "highest": [[6, 6], [6, 13], [6, 20]],
    }

    def validate(worker: ThreadWorker) -> dict[str, Any]:
        learner = learner_of(rows)
        learner.worker = worker
        return learner.validate(parts if worker.rank == 0 else [batch.rows(0, 0)] * 4).details

    from training import Group

    assert Group(2).run(validate) == [found.details] * 2


# Parameter groups and augmentation.


class Grouped(Letters):
    """Does not decay biases, and trains the embedding at a tenth of the learning rate."""

    def parameter_groups(self, model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        slow = [named.pop("bytes.weight")]
        return [{"params": slow, "lr_scale": 0.1}, {"params": list(named.values())}]


class Forgetful(Letters):
    """Leaves all parameters but one out of the optimizer."""

    def parameter_groups(self, model: nn.Module) -> Any:
        return [next(iter(model.parameters()))]


def test_groups_of_parameters_have_learning_rates_of_their_own(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, moved = batch_of(rows), []
    for recipe in (Letters, Grouped):
        use(monkeypatch, recipe)
        learner = learner_of(rows)
        before = {name: each.clone() for name, each in learner.network.named_parameters()}
        learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=0)
        after = dict(learner.network.named_parameters())
        moved.append({name: (after[name] - before[name]).norm().item() for name in before})
    for name, distance in moved[0].items():
        factor = 0.1 if name == "bytes.weight" else 1.0
        assert moved[1][name] == pytest.approx(distance * factor, rel=1e-3, abs=1e-9)


def test_parameters_that_no_group_has_are_refused(
    rows: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Forgetful)
    with pytest.raises(
        ConfigError, match=r"leaves out \d+ parameters of the model, such as positions"
    ):
        learner_of(rows)


# A batch that stands in for none.


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_first_samples_stand_in_for_none(tmp_path: Path, rows: Prepared, kind: str) -> None:
    data = rows if kind == "text" else task_of(small_config(tmp_path)).data
    found, wanted = read_stand_in(data), LocalCopy(data, data.train)[np.arange(2)]
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert found.ids.tolist() == [0, 1]


# What needs no code of the recipe.


class Minimal(Recipe[Model]):
    """Defines what a recipe has to define, and no more."""

    settings = Model

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))

    def loss(self, model: Forward, batch: Batch) -> Loss:
        values = model(batch["image"].float() / 255).flatten()
        return Loss(sum=(values - batch["label"]).square().sum(), weight=len(batch))


def test_a_recipe_of_two_methods_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Minimal(Model(name="x", in_channels=1, num_classes=10))
    assert recipe.check() == 65
    assert recipe.title() == "Minimal"
    with pytest.raises(LookupError, match="not prepared yet"):
        _ = recipe.info
    config = small_config(tmp_path)
    data = task_of(config).data
    monkeypatch.setattr(registry, "RECIPES", {"image_classification": Minimal})
    learner = Learner(config, data, Length.of(config, data.num_train), Worker(device=CPU))
    batch = LocalCopy(data, data.train)[np.arange(128)]
    losses = []
    for step in range(5):
        sums = learner.new_sums()
        learner.step(batch, sums, epoch=0, step_in_epoch=step)
        losses.append(sums.since_last()[0])
    assert losses[-1] < losses[0]
    assert learner.validate([batch]).to_json().keys() == {"num_samples", "loss"}
