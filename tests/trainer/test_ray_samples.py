"""The Ray loader gives the batches of the torch loader for a data set or a table of the user."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attempts import Attempts, committed, wait_for
from own_ray import own_ray
from own_recipes import own_config, packed, task_of_code
from training import Group, ThreadWorker, final_weights, same

from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import DatasetError
from trainyard_trainer.on_ray.sample_tasks import UserBatches, batches_ahead
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

CODE = """
import random
import numpy as np
import torch
from torch import nn
from trainyard_trainer import Loss, Recipe

class Words:
    '''Samples of all kinds: random changes, types that NumPy lacks, and lists of different lengths.'''

    def __init__(self, split, broken=-1):
        self.broken = broken

    def __len__(self):
        return 37

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError(f"no sample {index}")
        return {
            "word": torch.arange(index % 5 + 1),
            "noise": torch.rand(2, 3).bfloat16(),
            "pair": np.random.rand(2),
            "number": random.random(),
            "is_even": index % 2 == 0,
            "empty": torch.zeros(0),
        }

class Reader(Recipe):
    def collate(self, samples):
        words = [sample["word"] for sample in samples]
        others = [{k: v for k, v in sample.items() if k != "word"} for sample in samples]
        padded = nn.utils.rnn.pad_sequence(words, batch_first=True)
        return {"word": padded, **super().collate(others)}

    def build_model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        return Loss(sum=model(batch["noise"].float()).square().sum(), weight=2 * len(batch))
"""


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with own_ray(num_cpus=3, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        yield


def task_of(code: Path, storage: Path, **data: Any) -> TrainingTask:
    """The task of a run whose code lies in the run's folder alone, for the processes of Ray."""
    (code / "words.py").write_text(CODE)
    config = own_config(storage, recipe="words:Reader", dataset="words:Words", global_batch_size=8)
    loading = config.data.model_copy(update={"loader": "ray"} | data)
    return task_of_code(code, config.model_copy(update={"data": loading}))


def batches_of(
    task: TrainingTask, worker: ThreadWorker, start: Trained, *, by_ray: bool
) -> Batches:
    length = Length.of(task.config, task.data.num_train)
    if by_ray:
        return UserBatches(task, length, start, worker)
    collate = recipe_of(task.config, task.data.info).collate
    return TorchBatches(task.data, length, start, worker, task.config, collate)


def given(task: TrainingTask, world_size: int, start: Trained, *, by_ray: bool) -> list[Any]:
    """The batches of two epochs, of each worker."""

    def read(worker: ThreadWorker) -> list[Batch]:
        batches = batches_of(task, worker, start, by_ray=by_ray)
        assert batches.state() == {}
        return [batch for epoch in (1, 2) for batch in batches.epoch(epoch)]

    return Group(world_size).run(read) if by_ray else read_in_turn(world_size, read)


def read_in_turn(world_size: int, read: Any) -> list[Any]:
    """Read as worker after worker: threads would set the generators of one process at the same time."""
    group = Group(1)
    device = torch.device("cpu")
    return [
        read(ThreadWorker(rank=rank, world_size=world_size, device=device, group=group))
        for rank in range(world_size)
    ]


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("steps_in_epoch", [0, 2])
@pytest.mark.parametrize("changes", [{}, {"shuffle": False, "drop_last": False}])
def test_both_loaders_give_the_same_batches(
    ray_here: None,
    code: Path,
    tmp_path: Path,
    world_size: int,
    steps_in_epoch: int,
    changes: dict[str, Any],
) -> None:
    task = task_of(code, tmp_path, **changes)
    start = Trained(epoch=1, steps_in_epoch=steps_in_epoch)
    by_torch = given(task, world_size, start, by_ray=False)
    by_ray = given(task, world_size, start, by_ray=True)
    for one, other in zip(by_torch, by_ray, strict=True):
        for mine, rays in zip(one, other, strict=True):
            assert torch.equal(mine.ids, rays.ids)
            assert [*mine] == [*rays]
            for name in mine:
                assert mine[name].dtype == rays[name].dtype
                assert torch.equal(mine[name], rays[name])


@pytest.mark.ci
def test_a_table_gives_the_same_batches(ray_here: None, code: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", noise=np.arange(60, dtype=np.float32).reshape(20, 3))
    config = own_config(tmp_path, recipe="rows:Rows", global_batch_size=8)
    data = OwnData.model_validate({"source": str(tmp_path / "t.npz"), "loader": "ray"})
    (code / "rows.py").write_text(CODE.replace("Reader", "Rows").replace("def collate", "def no"))
    task = task_of_code(code, config.model_copy(update={"data": data}))
    by_torch = given(task, 1, Trained(epoch=1), by_ray=False)
    by_ray = given(task, 1, Trained(epoch=1), by_ray=True)
    assert len(by_ray[0]) == 4
    for mine, rays in zip(by_torch[0], by_ray[0], strict=True):
        assert torch.equal(mine["noise"], rays["noise"])


@pytest.mark.ci
def test_a_sample_that_cannot_be_read_is_named(ray_here: None, code: Path, tmp_path: Path) -> None:
    task = task_of(code, tmp_path, options={"broken": 11})
    with pytest.raises(
        DatasetError,
        match=r"data.dataset = words:Words: sample 11 of 'train' cannot be read: "
        r"ValueError: no sample 11 \(words.py, line 19",
    ):
        given(task, 1, Trained(epoch=1), by_ray=True)


@pytest.mark.ci
def test_the_batches_in_the_making_are_bounded(ray_here: None, code: Path, tmp_path: Path) -> None:
    task = task_of(code, tmp_path)
    # Of 3 CPUs one is the worker's: two tasks for each of the others.
    assert batches_ahead(task, 1) == 4
    assert batches_ahead(task, 3) == 2
    labelled = task.config.data.model_copy(update={"ray_nodes": {"none": "has"}})
    config = task.config.model_copy(update={"data": labelled})
    other = TrainingTask(config=config, data=task.data, attempt=1, startup=task.startup)
    assert batches_ahead(other, 1) == 2


@pytest.mark.slow
def test_a_run_with_the_ray_loader_trains_the_weights_of_the_torch_loader(
    attempts: Attempts, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "words.py").write_text(CODE)
    sha256, environment = packed(code)

    def run_of(storage: Path, loader: str) -> OwnRecipeConfig:
        config = own_config(
            storage,
            workers=2,
            recipe="words:Reader",
            dataset="words:Words",
            global_batch_size=8,
            epochs=30,
        )
        data = config.data.model_copy(update={"loader": loader})
        every = config.checkpoint.model_copy(update={"every_samples": 24})
        return config.model_copy(update={"code_sha256": sha256, "data": data, "checkpoint": every})

    whole, killed = run_of(attempts.storage / "whole", "torch"), run_of(attempts.storage, "ray")
    attempts.finish(whole, environment=environment)
    driver = attempts.start(killed, environment)
    assert wait_for(lambda: len(committed(killed)) > 1, 120)
    os.kill(attempts.processes("RayTrainWorker")[0], signal.SIGKILL)
    output, _ = driver.communicate(timeout=180)
    assert driver.returncode == 0, output
    assert same(final_weights(killed), final_weights(whole))
