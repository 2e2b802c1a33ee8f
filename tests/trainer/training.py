"""Small runs for tests: their config, their data, and the work of a worker without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import distributed, multiprocessing

from tests.support.settings import set_all
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import BuiltInConfig, TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine import worker as engine
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.sums import LossSums
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.engine.worker import work
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import read_lines
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.fence import Fence

T = TypeVar("T")

FORKSERVER = multiprocessing.get_context("forkserver")
"""Forks processes from a server that has imported torch already, which takes seconds."""
# The first step of an optimizer imports torch._dynamo, and building a model torchvision.
FORKSERVER.set_forkserver_preload([engine.__name__, "torch._dynamo", "torchvision"])

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits"},
    "train": {
        # With batch norm, and a checkpoint of 6 MB.
        "model": {
            "name": "shufflenet_v2_x0_5",
            "in_channels": 1,
            "num_classes": 10,
            "image_size": 8,
        },
        "epochs": 2,
        "global_batch_size": 128,
    },
    "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
}


def small_config(storage: Path, **changes: Any) -> TrainerConfig:
    """A run of seconds; `train__epochs=3` changes one value."""
    config = {
        key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()
    }
    config["train"]["model"] = dict(SMALL["train"]["model"])
    config["storage"] = {"path": str(storage)}
    return BuiltInConfig.model_validate(set_all(config, changes))


def open_folder(config: TrainerConfig) -> RunFolder:
    return RunFolder.open(config.storage.path, config.name)


def task_of(config: TrainerConfig, attempt: int = 1) -> TrainingTask:
    """What a driver would hand to its workers; its claim is there, and waits for nobody."""
    folder = open_folder(config)
    folder.write(f"{folder.lease}/a{attempt}.ended", "")
    folder.create(Fence(folder, attempt).path, "{}")
    data = open_data(config, folder)
    return TrainingTask(
        config=config, data=data, attempt=attempt, startup=Startup(began=time.time())
    )


def read_split(data: Prepared) -> pa.Table:
    """The training split, as it lies in its files."""
    return pq.read_table(list(data.train.files), filesystem=data.open_filesystem())


def train_here(config: TrainerConfig, *, attempt: int = 1) -> Outcome:
    """One worker's work in this process, with the files it writes and nothing of Ray."""
    return work(task_of(config, attempt), Worker(device=torch.device("cpu")))


def train_as_rank(
    rank: int, world_size: int, meeting_point: str, config: TrainerConfig, attempt: int = 1
) -> None:
    """One of several gloo processes; what multiprocessing starts must be importable."""
    with gloo_worker(rank, world_size, meeting_point) as worker:
        work(worker.from_rank_zero(task_of(config, attempt) if rank == 0 else None), worker)


@contextmanager
def gloo_worker(rank: int, world_size: int, meeting_point: str) -> Iterator[Worker]:
    """This process as one of several that talk by gloo."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size
    )
    try:
        yield Worker(rank=rank, world_size=world_size, device=torch.device("cpu"))
    finally:
        distributed.destroy_process_group()


@contextmanager
def step_losses(worker: Worker) -> Iterator[list[float]]:
    """The losses of the steps that are taken meanwhile, each over all workers."""
    losses: list[float] = []
    step = Learner.step

    def told(learner: Learner, batch: Batch, sums: LossSums, **place: int) -> float:
        before = sums.over_workers(worker)
        rate = step(learner, batch, sums, **place)
        loss, count, *_ = (sums.over_workers(worker) - before).tolist()
        losses.append(loss / count)
        return rate

    with patch.object(Learner, "step", told):
        yield losses


def run_processes(
    work: Callable[..., None], arguments: tuple[Any, ...], count: int, *, is_fresh: bool = False
) -> None:
    """Run `work(rank, *arguments)` in this many new processes, and wait for all of them.

    A fresh process imports everything itself; it has this process's environment as it is now.
    """
    method = "spawn" if is_fresh else "forkserver"
    multiprocessing.start_processes(work, arguments, count, start_method=method)


def train_and_tell(rank: int, meeting_point: str, configs: list[TrainerConfig], told: str) -> None:
    """One of the processes that train these runs, one after the other; `told` is a file for all losses."""
    with gloo_worker(rank, configs[0].scaling.num_workers, meeting_point) as worker:
        losses = []
        for config in configs:
            task = worker.from_rank_zero(task_of(config) if rank == 0 else None)
            with step_losses(worker) as of_steps:
                work(task, worker)
            losses.append(of_steps)
        if rank == 0:
            torch.save(losses, told)


class Group:
    """Workers that are threads of this process; what they tell each other goes from one to the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What each worker passed here, by rank."""
        self._given[rank] = value
        self._barrier.wait()
        values = list(self._given)
        self._barrier.wait()
        return values

    def run(self, work: Callable[[ThreadWorker], T]) -> list[T]:
        """The results of the same work on each worker, by rank."""
        workers = [
            ThreadWorker(rank=rank, world_size=self.size, device=torch.device("cpu"), group=self)
            for rank in range(self.size)
        ]
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(work, workers))


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadWorker(Worker):
    """One of a group in this process."""

    group: Group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        given = self.group.exchange(self.rank, values.clone())
        return torch.stack(given).sum(dim=0, dtype=values.dtype)

    def from_rank_zero(self, value: Any) -> Any:
        return self.group.exchange(self.rank, value)[0]

    def gathered(self, value: Any) -> list[Any]:
        return self.group.exchange(self.rank, value)


def final_weights(config: TrainerConfig) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(open_folder(config))
    newest = checkpoints.newest()
    assert newest is not None
    return checkpoints.load(newest.name, MODEL)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def metrics(config: TrainerConfig, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, all or of one kind."""
    folder = open_folder(config)
    records = read_lines(folder, folder.metrics)
    return [record for record in records if kind in (None, record["kind"])]
