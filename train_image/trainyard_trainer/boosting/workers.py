"""Train a run with `train.recipe: gradient_boosting` on Ray, with XGBoostTrainer or LightGBMTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from trainyard_trainer.on_ray import driver  # first: Ray reads some variables when it is imported

# isort: split
import ray
import ray.train
import ray.train.collective
import ray.util
import torch
from torch import distributed
from typing_extensions import assert_never

from trainyard_trainer.boosting.rounds import BoostingTask, work
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.on_ray.gauges import published_gauges
from trainyard_trainer.on_ray.worker import ray_place, seconds_until_drain
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import Lease


def fit(task: BoostingTask, folder: RunFolder, lease: Lease) -> Outcome:
    """Train on Ray with `scaling.num_workers` workers."""
    return driver.fit(task, folder, lease, make_trainer)


def make_trainer(task: BoostingTask, **common: Any) -> Any:
    """Return Ray Train's trainer for the library. It connects the library's workers with each other."""

    # The controller does not load this function. As an argument of the trainer, it would load the task.
    def train() -> Any:
        return train_worker(task)

    match task.config.train.library:
        case "xgboost":
            from ray.train.xgboost import XGBoostTrainer

            return XGBoostTrainer(train, **common)
        case "lightgbm":
            from ray.train.lightgbm import LightGBMTrainer

            return LightGBMTrainer(train, **common)
        case _:
            assert_never(task.config.train.library)


def train_worker(task: BoostingTask) -> dict[str, Any]:
    """Train on one Ray Train worker, and return its outcome as plain data."""
    with joined_group(task) as worker, published_gauges(task, worker.rank) as gauges:
        outcome = work(
            task,
            worker,
            network=network_of_lightgbm,
            drain_s=seconds_until_drain,
            gauges=gauges,
            place=ray_place(),
        )
    return outcome.to_plain()


def network_of_lightgbm() -> dict[str, Any]:
    """Return LightGBM's network parameters, as Ray Train knows them. XGBoost needs none."""
    from ray.train import lightgbm

    return dict(lightgbm.get_network_params())


@contextmanager
def joined_group(task: BoostingTask) -> Iterator[Worker]:
    """Join a PyTorch process group and yield this worker.

    The communication of XGBoost and LightGBM is internal to these libraries.
    """
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if size > 1:
        timeout = timedelta(seconds=task.config.faults.collective_timeout_s)
        store, address = None, None
        if rank == 0:
            # Port 0 selects a free port.
            here = ray.util.get_node_ip_address()
            store = distributed.TCPStore(
                here, 0, size, is_master=True, timeout=timeout, wait_for_workers=False
            )
            address = (here, store.port)
        host, port = ray.train.collective.broadcast_from_rank_zero(address)
        if store is None:
            store = distributed.TCPStore(host, port, size, is_master=False, timeout=timeout)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timeout
        )
    try:
        yield Worker(rank=rank, world_size=size, device=torch.device("cpu"))
    finally:
        if size > 1:
            distributed.destroy_process_group()
