"""The Ray loader gives the batches of the torch loader for streams, and for data and tables of the user."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from attempts import Attempts, committed, wait_for
from own_ray import own_ray
from own_recipes import own_config, packed, task_of_code
from pyarrow import parquet
from test_streaming import (
    RECIPE,
    image_run,
    table_run,
    write_image_parquet,
    write_table,
    write_tars,
)
from training import Group, ThreadWorker, final_weights, open_folder, same

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.trainer_config import OwnRecipeConfig, TrainerConfig
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.image_stream import PROBED_IMAGES
from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import DatasetError
from trainyard_trainer.on_ray.sample_tasks import SampleBatches, batches_per_window, tasks_ahead
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.measurements.progress import Length, Trained
from trainyard_trainer.run_folder.measurements.startup import Startup

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
        return SampleBatches(task, length, start, worker)
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
    check_same(by_torch, by_ray)


def check_same(by_torch: list[list[Batch]], by_ray: list[list[Batch]]) -> None:
    """The batches of each worker have the same ids and columns, bit for bit."""
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


# Streams.


def write_image_lance(folder: Path) -> Path:
    lance = pytest.importorskip("lance")
    table = parquet.read_table(write_image_parquet(folder / "parquet"))
    images = pa.array([image["bytes"] for image in table["image"].to_pylist()], pa.binary())
    table = table.set_column(0, "image", images)
    lance.write_dataset(table, str(folder / "images.lance"), max_rows_per_file=10)
    return folder / "images.lance"


def write_table_lance(folder: Path) -> Path:
    lance = pytest.importorskip("lance")
    table = parquet.read_table(write_table(folder / "parquet"))
    lance.write_dataset(table, str(folder / "t.lance"), max_rows_per_file=5)
    return folder / "t.lance"


def streamed_task(storage: Path, config: TrainerConfig, **loading: Any) -> TrainingTask:
    data = config.data.model_copy(update={"loader": "ray"} | loading)
    config = config.model_copy(update={"data": data})
    startup = Startup(began=0.0)
    return TrainingTask(
        config=config, data=open_data(config, open_folder(config)), attempt=1, startup=startup
    )


@pytest.mark.ci
@pytest.mark.parametrize("write", [write_image_parquet, write_tars, write_image_lance])
@pytest.mark.parametrize(("world_size", "steps_in_epoch"), [(1, 0), (2, 2)])
def test_a_stream_of_images_gives_the_same_batches(
    ray_here: None, tmp_path: Path, write: Any, world_size: int, steps_in_epoch: int
) -> None:
    config = image_run(
        tmp_path,
        write(tmp_path / "data"),
        data__loader="ray",
        data__drop_last=False,
        train__global_batch_size=8,
    )
    check_streamed(streamed_task(tmp_path, config), world_size, steps_in_epoch)


@pytest.mark.ci
@pytest.mark.parametrize("write", [write_table, write_table_lance])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_of_a_table_gives_the_same_batches(
    ray_here: None, code: Path, tmp_path: Path, write: Any, shuffle: bool
) -> None:
    (code / "line.py").write_text(RECIPE)
    task = task_of_code(code, table_run(tmp_path, write(tmp_path / "data")))
    loading = task.config.data.model_copy(update={"loader": "ray", "shuffle": shuffle})
    config = task.config.model_copy(update={"data": loading})
    check_streamed(replace(task, config=config), 2, 1)


def check_streamed(task: TrainingTask, world_size: int, steps_in_epoch: int) -> None:
    """Each worker gets the batches of the torch loader, in two epochs."""
    start = Trained(epoch=1, steps_in_epoch=steps_in_epoch)
    by_torch = given(task, world_size, start, by_ray=False)
    by_ray = given(task, world_size, start, by_ray=True)
    assert len(by_ray[0]) == 2 * -(-task.data.num_train // 8) - steps_in_epoch
    check_same(by_torch, by_ray)


@pytest.mark.ci
def test_a_task_reads_each_group_of_a_stream_for_many_batches(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = image_run(tmp_path, write_image_parquet(tmp_path / "data"), train__global_batch_size=2)
    task = streamed_task(tmp_path, config)
    length = Length.of(task.config, task.data.num_train)
    batches = SampleBatches(task, length, Trained(), Worker(device=torch.device("cpu")))
    # A window has 2 groups of 10 images. There are 25 batches, and 4 tasks at once.
    assert batches_per_window(task.data.order, 2) == 10
    assert batches.most_per_task == 7
    assert len(torch.cat([batch.ids for batch in batches.epoch(0)]).unique()) == 50


@pytest.mark.ci
def test_an_image_of_a_stream_that_cannot_be_decoded_is_named(
    ray_here: None, tmp_path: Path
) -> None:
    table = parquet.read_table(write_image_parquet(tmp_path / "whole"))
    images = [image["bytes"] for image in table["image"].to_pylist()]
    images[PROBED_IMAGES] = b"no picture"  # behind those that are read when the stream is opened
    table = table.set_column(0, "image", pa.array(images))
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(table.slice(0, 40), folder / "train.parquet")
    parquet.write_table(table.slice(40), folder / "valid.parquet")
    config = image_run(tmp_path, folder, train__global_batch_size=8)
    task = streamed_task(tmp_path, config)
    with pytest.raises(DatasetError, match=r"row 32: the image cannot be decoded"):
        given(task, 1, Trained(epoch=1), by_ray=True)


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
def test_the_tasks_at_work_are_bounded(ray_here: None, code: Path, tmp_path: Path) -> None:
    task = task_of(code, tmp_path)
    # Of 3 CPUs one is the worker's: two tasks for each of the others.
    assert tasks_ahead(task, 1) == 4
    assert tasks_ahead(task, 3) == 2
    labelled = task.config.data.model_copy(update={"ray_nodes": {"none": "has"}})
    config = task.config.model_copy(update={"data": labelled})
    other = TrainingTask(config=config, data=task.data, attempt=1, startup=task.startup)
    assert tasks_ahead(other, 1) == 2


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
