"""What a worker of Ray Train runs: the engine's loop, with what Ray knows of the worker.

The driver never imports this module: the imports of the engine take seconds.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.v2._internal.execution.context import get_train_context
from typing_extensions import assert_never

from trainyard_trainer.checkpointing.resume import Start
from trainyard_trainer.config.kept_state import keeps_state
from trainyard_trainer.data.loading.batch import Batches
from trainyard_trainer.data.loading.ray_loader import RayBatches
from trainyard_trainer.data.loading.stream_order import Stream
from trainyard_trainer.data.loading.user_dataset import UserDataset
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine.joining import RayPlace
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.engine.worker import MakeBatches, torch_batches, work
from trainyard_trainer.on_ray.controller import membership
from trainyard_trainer.on_ray.controller.hanging import tell
from trainyard_trainer.on_ray.controller.state_keepers import KeeperOfNode
from trainyard_trainer.on_ray.gauges import published_gauges
from trainyard_trainer.on_ray.ray_cluster import NO_MODULES
from trainyard_trainer.on_ray.sample_tasks import SampleBatches
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length


def train_worker(task: TrainingTask) -> dict[str, Any]:
    """Train on one Ray Train worker, and return its outcome as plain data."""
    # Processes that load data start with the current folder on their import path: it must have no modules.
    os.chdir(NO_MODULES)
    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = ray.train.get_context()
    worker = Worker(
        rank=context.get_world_rank(), world_size=context.get_world_size(), device=device
    )
    tell(worker.activity)
    with published_gauges(task, worker.rank) as gauges:
        outcome = work(
            task,
            worker,
            make_batches=batches_of_loader(task.config.data.loader),
            # Not all workers would call a function of Ray Train alike after the loss of one.
            drain_s=own_seconds_until_drain if membership.current() else seconds_until_drain,
            gauges=gauges,
            place=ray_place(),
            regrouping=membership.current(),
            memory=KeeperOfNode() if keeps_state(task.config) else None,
        )
    return outcome.to_plain()


def ray_place() -> RayPlace:
    """Return Ray's ids of this worker and of its node."""
    context = ray.get_runtime_context()
    return RayPlace(worker=context.get_worker_id(), node=context.get_node_id())


def ray_batches(task: TrainingTask, length: Length, start: Start, worker: Worker) -> Batches:
    """Return the training batches of the Ray loader, from the position of the checkpoint on."""
    if isinstance(task.data, UserDataset | Stream):
        return SampleBatches(task, length, start.trained, worker)
    saved = start.state["partial_epoch"].get("batches", {}) if start.state else {}
    assert isinstance(task.data, Prepared)
    return RayBatches(task.data, length, start.trained, saved, worker, task.config)


def batches_of_loader(loader: Literal["torch", "ray"]) -> MakeBatches:
    """Return the function that makes the training batches for a value of `data.loader`."""
    match loader:
        case "torch":
            return torch_batches
        case "ray":
            return ray_batches
        case _:
            assert_never(loader)


def seconds_until_drain() -> float | None:
    """Return the seconds until a worker's node goes away; None if Ray has announced no such drain.

    All workers call this function at the same step.
    """
    return seconds_until(ray.train.get_preemption_info())


def own_seconds_until_drain() -> float | None:
    """Return the seconds until a worker's node goes away, as far as this worker alone knows it."""
    return seconds_until(get_train_context().preemption_context.preemption_info)


def seconds_until(info: Any) -> float | None:
    """Return the seconds until the deadline of Ray's notice; None without a notice."""
    if info is None:
        return None
    return max(info.deadline_ms / 1000 - time.time(), 0.0) if info.deadline_ms else 0.0
