"""Training batches of a stream, or of a data set or table of the user, made by Ray tasks in the cluster.

The batches are those of the torch loader: the same samples in the same order, with the same random changes.
A task makes whole batches of a worker: one of a data set that is read sample by sample, and several
consecutive ones of a stream, so that it reads each of its groups of rows for many batches.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from trainyard_trainer.on_ray.ray_cluster import NO_MODULES  # first: Ray reads variables

# isort: split
import numpy as np
import ray
import ray.exceptions
import torch
from torch.utils.data import Dataset

from trainyard_trainer.config.trainer_config import code_of
from trainyard_trainer.data.loading.batch import Batch, BatchRequest
from trainyard_trainer.data.loading.ray_source import STORE_SHARE, ahead
from trainyard_trainer.data.loading.rows import open_rows, stream_of
from trainyard_trainer.data.loading.stream_order import StreamOrder
from trainyard_trainer.data.loading.torch_loader import GlobalBatches
from trainyard_trainer.data.loading.user_dataset import UserRows
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import TrainerError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.recipe import collate_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

FEWEST_AHEAD = 2
"""The number of batches of a worker that are made or wait at the same time, at least."""

WINDOWS_PER_TASK = 4
"""The number of windows of a stream of which one task makes the batches, at most.

Its first and its last window may be read by a neighbouring task, too.
"""

TASKS_PER_CPU = 2
"""The number of tasks that are submitted for each CPU: one runs, and the next one waits."""


RunKey = tuple[str, str, int]
"""The storage and the name of a run, and its attempt."""

PlainBatch = tuple[dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]], np.ndarray]
"""A batch as Ray sends it without a copy: bytes, data type and shape of each column; and the ids."""


class SampleBatches:
    """The training batches of one worker. Their order needs no state: it follows from seed and epoch."""

    def __init__(self, task: TrainingTask, length: Length, start: Trained, worker: Worker) -> None:
        data, train = task.config.data, task.config.train
        self.start = start
        self.nodes = data.ray_nodes
        self.is_pinned = worker.device.type == "cuda"
        self.stream = stream_of(task.data)
        self.sampler = GlobalBatches(
            length, worker, shuffle=data.shuffle, seed=train.seed, stream=self.stream
        )
        self.tasks_ahead = tasks_ahead(task, worker.world_size)
        self.most_per_task = 1
        if self.stream is not None:
            windows = batches_per_window(self.stream, length.global_batch_size) * WINDOWS_PER_TASK
            self.most_per_task = min(windows, -(-length.steps_per_epoch // self.tasks_ahead))
        store = ray.cluster_resources()["object_store_memory"]
        self.room_bytes = STORE_SHARE * store / worker.world_size
        self._key: RunKey = (task.config.storage.path, task.config.name, task.attempt)
        self._task = ray.put(task)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.sampler.begin(epoch, self.start)
        return ahead(self._batches(epoch), self.nodes)

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """Yield batches in the order of their requests, while tasks make the next ones.

        The first tasks make one batch each, whose size tells how many there is room for.
        """
        make = _make_batches.options(label_selector=self.nodes)
        pending: deque[ray.ObjectRefGenerator] = deque()
        requests = iter(self.sampler)
        tasks, per_task = self.tasks_ahead, 1
        while True:
            while len(pending) <= tasks and (several := list(islice(requests, per_task))):
                pending.append(make.remote(self._key, [self._task], several, epoch))
            if not pending:
                return
            for reference in pending.popleft():
                batch = _received(reference, is_pinned=self.is_pinned)
                room = max(FEWEST_AHEAD, int(self.room_bytes // size_of(batch)))
                tasks = min(self.tasks_ahead, room)
                per_task = min(self.most_per_task, room // tasks)
                yield batch


def batches_per_window(stream: StreamOrder, batch_size: int) -> int:
    """Return the number of global batches of the groups of rows that are shuffled together, about."""
    mean_rows = sum(stream.group_rows) / len(stream.group_rows)
    return max(1, int(stream.groups_at_once * mean_rows // batch_size))


def tasks_ahead(task: TrainingTask, world_size: int) -> int:
    """Return how many tasks of a worker are submitted at once, so that all CPUs for data have work."""
    nodes = [
        node["Resources"].get("CPU", 0)
        for node in ray.nodes()
        if node["Alive"] and (task.config.data.ray_nodes or {}).items() <= node["Labels"].items()
    ]
    cpus = sum(nodes)
    if task.config.data.ray_nodes is None:
        cpus -= world_size * task.config.scaling.cpus_per_worker
    return max(FEWEST_AHEAD, int(-(-TASKS_PER_CPU * cpus // world_size)))


def size_of(batch: Batch) -> int:
    """Return the bytes of the columns of a batch, at least 1."""
    return max(1, sum(batch[name].nbytes for name in batch))


def _received(reference: ray.ObjectRef[PlainBatch], *, is_pinned: bool) -> Batch:
    """Wait for a batch and copy it out of Ray's object store. Raises the error of the task."""
    try:
        columns, ids = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TrainerError):
            raise type(error.cause)(str(error.cause)) from error
        raise
    copies = {name: _copied(*column, is_pinned=is_pinned) for name, column in columns.items()}
    return Batch(copies, _copied(ids, torch.int64, ids.shape, is_pinned=is_pinned))


def _copied(
    values: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], *, is_pinned: bool
) -> torch.Tensor:
    """Copy the bytes of a column into a tensor."""
    column = torch.empty(shape, dtype=dtype, pin_memory=is_pinned)
    bytes_of(column)[:] = values.view(np.uint8)
    return column


def bytes_of(column: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as (N,) uint8: NumPy lacks some types of PyTorch."""
    return column.reshape(-1).view(torch.uint8).numpy()


# In a process of Ray.

_opened: dict[RunKey, Dataset[Batch]] = {}
"""The training split of the run whose batches this process makes."""


@ray.remote(num_cpus=1, max_retries=-1, scheduling_strategy="DEFAULT", num_returns="streaming")
def _make_batches(
    key: RunKey, task: list[ray.ObjectRef[TrainingTask]], several: Sequence[np.ndarray], epoch: int
) -> Iterator[PlainBatch]:
    """Make batches of the training split, which is opened by the first task of a process."""
    if key not in _opened:
        _opened.clear()
        _opened[key] = _open_rows(ray.get(task[0]))
    rows = _opened[key]
    for indices in several:
        batch = rows[BatchRequest(indices, epoch) if isinstance(rows, UserRows) else indices]
        columns = {name: batch[name].detach().cpu().contiguous() for name in batch}
        plain = {
            name: (bytes_of(each), each.dtype, tuple(each.shape)) for name, each in columns.items()
        }
        yield plain, batch.ids.numpy()


def _open_rows(task: TrainingTask) -> Dataset[Batch]:
    """Make the user's code importable, and open the training split of a run in this process."""
    os.chdir(NO_MODULES)  # as in a worker, whose current folder has no modules
    torch.set_num_threads(1)
    config = task.config
    if code := code_of(config):
        folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
        code_archive.make_importable(folder, code)
    collate = collate_of(recipe_of(config, task.data.info))
    return open_rows(task.data, "train", seed=config.train.seed, collate=collate, is_pinned=False)
