"""A worker that is much slower than the others is named with its node."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from own_recipes import EXAMPLES, own_config
from training import gloo_worker, open_folder, run_processes, task_of

from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.engine.measuring import slow_workers
from trainyard_trainer.engine.measuring.slow_workers import SlowWorkers
from trainyard_trainer.engine.measuring.slow_workers import slow_workers as find
from trainyard_trainer.engine.worker import work
from trainyard_trainer.run_files.programs import code_imports
from trainyard_trainer.run_folder.measurements.progress import SlowWorker, read_lines

NODES = ("a", "b", "b", "c")


@pytest.mark.parametrize(
    ("own_s", "slow"),
    [
        ([1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 1.1, 0.9, 1.9], []),
        ([1.0, 1.1, 0.9, 2.1], [3]),
        ([3.0, 1.1, 0.9, 2.3], [0, 3]),
        # Half of them: the others are what is usual.
        ([3.0, 1.0, 1.0, 3.0], [0, 3]),
        ([0.0, 0.0, 0.0, 1.0], [3]),
        # Four times as long, which costs nobody much.
        ([0.01, 0.01, 0.01, 0.04], []),
        ([0.5, 1.0], [1]),
        ([1.0], []),
    ],
)
def test_a_worker_is_slow_that_needs_twice_the_median_and_a_good_part_of_the_step(
    own_s: Sequence[float], slow: list[int]
) -> None:
    found = find(own_s, NODES, step_s=1.0)
    assert [worker.rank for worker in found] == slow
    assert all(worker.node == NODES[worker.rank] for worker in found)


def test_workers_are_compared_by_their_mean_over_a_minute_and_a_hundred_steps() -> None:
    now = 0.0
    workers = SlowWorkers(("a", "b"), 40, now=lambda: now)

    def go(seconds: int, own_s: Sequence[float], steps: int) -> list[int]:
        nonlocal now, step
        for _ in range(seconds):
            now, step = now + 1.0, step + steps
            workers.add(step, own_s)
        return [worker.rank for worker in workers.found]

    step = 40
    assert go(59, (0.1, 0.5), steps=2) == []
    assert go(1, (0.1, 0.5), steps=2) == [1]
    # A slow stretch within a window that was fast as a whole, and at last one with too few steps.
    assert go(10, (0.1, 0.5), steps=2) == [1]
    assert go(50, (0.1, 0.1), steps=2) == []
    assert go(60, (0.1, 9.0), steps=1) == []
    assert go(40, (0.1, 9.0), steps=1) == [1]
    (found,) = workers.found
    assert found == SlowWorker(rank=1, node="b", step_s=9.0, median_s=pytest.approx(0.1))


# Two real workers, of which one sleeps.

SLEEPER = """
import time
from torch import distributed, nn
from autoencoder import Autoencoder, AutoencoderSettings
from trainyard_trainer import Loss


class SleeperSettings(AutoencoderSettings):
    slow: int
    where: str
    weighs: bool


class Sleeper(Autoencoder):
    settings = SleeperSettings

    def build_model(self):
        return nn.Sequential(nn.BatchNorm1d(64), super().build_model())

    def sleep(self, where):
        if distributed.get_rank() == self.config.slow and where == self.config.where:
            time.sleep(0.05)

    def loss_weight(self, batch):
        self.sleep("loss_weight")
        return super().loss_weight(batch)

    def loss(self, model, batch):
        self.sleep("loss")
        loss = super().loss(model, batch)
        weight = batch["image"].new_tensor(loss.weight)
        return Loss(sum=loss.sum, weight=weight) if self.config.weighs else loss
"""


def train_with_a_sleeper(
    rank: int, meeting_point: str, config: OwnRecipeConfig, folder: str
) -> None:
    """One of two workers; windows are short."""
    code_imports.install([folder, str(EXAMPLES)])
    torch.set_num_threads(1)
    with (
        patch.multiple(slow_workers, WINDOW_S=3.0, WINDOW_STEPS=20),
        gloo_worker(rank, 2, meeting_point) as worker,
    ):
        work(worker.from_rank_zero(task_of(config) if rank == 0 else None), worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "where", "weighs", "strategy"),
    [
        pytest.param(1, "loss", False, "ddp", id="one that waits for buffers of rank 0"),
        pytest.param(0, "loss", False, "ddp", id="rank 0, for whose buffers the other waits"),
        pytest.param(1, "loss", True, "ddp", id="one whose weight of losses the other waits for"),
        pytest.param(0, "loss_weight", False, "fsdp2", id="between the passes of a sharded model"),
    ],
)
def test_a_worker_that_sleeps_in_its_recipe_is_named_with_its_node(
    tmp_path: Path, slow: int, where: str, weighs: bool, strategy: str
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "sleeper.py").write_text(SLEEPER)
    config = own_config(
        tmp_path,
        "autoencoder",
        workers=2,
        recipe="sleeper:Sleeper",
        model={"slow": slow, "where": where, "weighs": weighs},
        strategy=strategy,
        epochs=3,
    )
    run_processes(train_with_a_sleeper, (str(tmp_path / "meet"), config, str(code)), 2)
    folder = open_folder(config)
    lines = read_lines(folder, folder.metrics)
    told = [worker for line in lines for worker in line.get("slow_workers", [])]
    assert {(worker["rank"], worker["node"]) for worker in told} == {(slow, socket.gethostname())}
    assert all(worker["step_s"] > 0.05 for worker in told)
    assert json.loads(folder.read(folder.progress))["slow_workers"] == told[-1:]
