"""`verify` finds what breaks the engine's guarantees in a recipe, and names it; healthy recipes pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_recipes import own_config
from training import open_folder, small_config

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.errors import RunError
from trainyard_trainer.tools.verification.checks import CHECKS, CheckResult
from trainyard_trainer.tools.verification.trials import Bench, Trial
from trainyard_trainer.tools.verify import line_of, verify

BROKEN = """
import random
import time
import numpy as np
import torch
from torch.nn import functional
from regression import Patients, Regression
from trainyard_trainer import Loss


class GlobalRandom(Regression):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        return Loss(sum=found.sum * (1 + random.random()), weight=found.weight, metrics=found.metrics)


class NumpyDropout(Regression):
    def loss(self, model, batch):
        mask = torch.from_numpy(np.random.rand(*batch["features"].shape) > 0.5)
        return super().loss(model, batch.replace(features=batch["features"] * mask))


class Mean(Regression):
    def loss(self, model, batch):
        predicted = model(batch["features"]).squeeze(1)
        tokens = (batch["target"] * 7).long() % 5 + 1  # as if rows had different lengths
        squared = (predicted - batch["target"]) ** 2 * tokens
        mean = squared.sum() / tokens.sum()
        count = len(batch)
        return Loss(sum=mean * count, weight=count, metrics={"rmse": (squared.sum(), count)})


class UnsavedModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, features):
        if self.training:
            self.scale.mul_(0.9)
        return self.layer(features) * self.scale


class UnsavedBuffer(Regression):
    def build_model(self):
        return UnsavedModel()


class Counter(Regression):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        found = super().loss(model, batch)
        return Loss(sum=found.sum / self.calls, weight=found.weight, metrics=found.metrics)


class NotANumber(Regression):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        factor = float("nan") if len(batch) == 1 else 1.0
        return Loss(sum=found.sum * factor, weight=found.weight, metrics=found.metrics)


class Kept(Regression):
    def loss(self, model, batch):
        self.seen = getattr(self, "seen", set()) | {int(batch.ids[0])}
        noise = torch.rand(1).squeeze() * 0
        found = super().loss(model, batch)
        return Loss(sum=found.sum + noise, weight=found.weight, metrics=found.metrics)


class Clock(Regression):
    def loss(self, model, batch):
        if time.time() < 0 or batch["target"].sum().item() < 0:
            raise ValueError
        return super().loss(model, batch)
"""


REPEATED = {"same bits twice", "inside a step"}
"""The checks that fail if a training cannot be repeated; others then cannot compare anything."""


def failed(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, each in results.items() if each.result == "FAILED"}


@pytest.mark.ci
def test_a_healthy_recipe_passes_all_checks(code: Path, tmp_path: Path) -> None:
    found = list(verify(own_config(tmp_path), steps=4))
    assert [(each.check, each.result) for each in found] == [(name, "ok") for name in CHECKS]
    lines = [line_of(each) for each in found]
    assert lines[0].startswith("same bits twice         ok             SHA-256 of all weights")
    assert "SIGKILL after step 3 of 4, resumed from step 2" in lines[1]
    assert "of 30 samples 0 lost, 0 used twice" in lines[6]
    assert not (tmp_path / "own").exists()


@pytest.mark.ci
def test_a_built_in_recipe_with_batch_norm_says_what_cannot_be_compared(tmp_path: Path) -> None:
    found = {each.check: each for each in verify(small_config(tmp_path), steps=3)}
    assert not failed(found)
    incomparable = {name for name, each in found.items() if each.result == "not comparable"}
    assert incomparable == {"1 and 2 workers", "micro-batches"}
    assert "layers of batch norm" in found["micro-batches"].numbers


@pytest.mark.ci
@pytest.mark.parametrize(
    ("recipe", "checks", "lines"),
    [
        (
            "GlobalRandom",
            REPEATED,
            {"inside a step": ["random.random is called in broken.py, line 14, in loss"]},
        ),
        (
            "NumpyDropout",
            REPEATED,
            {"inside a step": ["numpy.random.rand is called in broken.py, line 19, in loss"]},
        ),
        (
            "Mean",
            {"1 and 2 workers", "micro-batches"},
            {"micro-batches": ["Loss.sum has to be the sum"]},
        ),
        (
            "UnsavedBuffer",
            {"same bits after a kill", "saved and loaded", "micro-batches"},
            {"saved and loaded": ["training changes model.scale (a buffer with persistent=False)"]},
        ),
        (
            "Counter",
            {"same bits after a kill", "saved and loaded", "micro-batches"},
            {
                "saved and loaded": [
                    "training changes recipe.calls: 2 -> 4, and it is in no checkpoint"
                ]
            },
        ),
        (
            "NotANumber",
            {"micro-batches"},
            {"micro-batches": ["micro_batch_size 1: loss differs by nan"]},
        ),
        (
            "Kept",  # numbers that differ between workers are a warning
            {"saved and loaded"},
            {
                "saved and loaded": ["training changes recipe.seen: "],
                "inside a step": ["torch.rand is called in broken.py"],
            },
        ),
        (
            "Clock",
            {"inside a step"},
            {
                "inside a step": [
                    "time.time is called in broken.py, line 76, in loss",
                    "Tensor.item is called in broken.py, line 76, in loss",
                ]
            },
        ),
    ],
)
def test_a_broken_recipe_is_caught_by_name(
    code: Path, tmp_path: Path, recipe: str, checks: set[str], lines: dict[str, list[str]]
) -> None:
    (code / "broken.py").write_text(BROKEN)
    config = own_config(tmp_path, recipe=f"broken:{recipe}")
    found = {each.check: each for each in verify(config, steps=4)}
    assert failed(found) == checks
    for check, starts in lines.items():
        assert found[check].result in ("FAILED", "warning")
        for start in starts:
            assert any(line.startswith(start) for line in found[check].details), found[check]


@pytest.mark.ci
def test_a_killed_trial_that_was_not_killed_is_an_error(code: Path, tmp_path: Path) -> None:
    config = own_config(tmp_path)
    data = open_data(config, open_folder(config))
    bench = Bench(config=config, data=data, steps=3, folder=str(tmp_path))
    with pytest.raises(RunError, match=r"to be killed ended with the exit codes \[0\]"):
        bench.run(Trial(steps=3, kill_after=9))
