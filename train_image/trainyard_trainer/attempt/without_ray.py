"""The same loop without Ray: in this process alone, or in each process that torchrun has started.

    TRAINYARD_CONFIG=... python -m trainyard_trainer --without-ray
    TRAINYARD_CONFIG=... torchrun --standalone --nproc-per-node 2 -m trainyard_trainer --without-ray

Both are what Ray Train is measured against, and a way to train where Ray cannot be had.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import torch
from torch import distributed

from trainyard_trainer.attempt import attempt
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.engine.worker import work
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import BACKENDS, Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.ownership.lease import Lease


def run(config: TrainerConfig, output: Output, environment: Mapping[str, str] = os.environ) -> None:
    """Bring the run to its end with the processes that are there. Raises TrainerError."""
    worker = join(config, environment)
    if worker.rank == 0:
        Leader(worker).run(config, output)
    else:
        follow(worker)
    if worker.world_size > 1:
        distributed.destroy_process_group()


def join(config: TrainerConfig, environment: Mapping[str, str]) -> Worker:
    """This process's place in the group that torchrun has made; a group of one without it.

    Raises ConfigError.
    """
    rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    if config.data.loader == "ray":
        raise ConfigError("data.loader = ray needs Ray. Without it, set data.loader=torch.")
    if world_size != config.scaling.num_workers:
        raise ConfigError(
            f"the run has {config.scaling.num_workers} workers, but {world_size} processes were "
            f"started. Use torchrun --nproc-per-node {config.scaling.num_workers}, or "
            f"resources of {world_size}."
        )
    device = torch.device("cpu")
    if config.scaling.use_gpu:
        if not torch.cuda.is_available():
            raise ConfigError(
                "CUDA is missing: torch.cuda.is_available() is False. Install the NVIDIA driver, "
                "or train with resources.workers in place of resources.gpus."
            )
        device = torch.device("cuda", int(environment.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:
        distributed.init_process_group(BACKENDS[device.type])
    return Worker(rank=rank, world_size=world_size, device=device)


class Leader:
    """Rank 0: runs the attempt, tells the others what to work on, and works on it with them."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.is_working = False

    def run(self, config: TrainerConfig, output: Output) -> None:
        try:
            attempt.run(config, output, self.fit)
        finally:
            # Whoever was torn from the work finds the others in the midst of it: they see the end of the
            # connection. Else they wait to be told, and leave in good order.
            if not self.is_working:
                self.worker.from_rank_zero(None)

    def fit(self, task: TrainingTask, folder: RunFolder, lease: Lease) -> Outcome:
        def work_with_others() -> Outcome:
            self.is_working = True
            outcome = work(self.worker.from_rank_zero(task), self.worker)
            self.is_working = False
            return outcome

        attempt.fetch_here(task, folder)
        return attempt.fit_here(work_with_others, folder, task.attempt)


def follow(worker: Worker) -> None:
    """All other ranks: work on what rank 0 tells, until there is nothing more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 says when to leave
    while task := worker.from_rank_zero(None):
        work(task, worker)
