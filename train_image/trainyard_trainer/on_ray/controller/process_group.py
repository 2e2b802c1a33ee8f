"""Ray Train's trainer for PyTorch workers, without PyTorch in Ray Train's controller.

Ray Train's own TorchTrainer imports PyTorch in the controller's process: seconds of CPU time before the first
worker starts, and memory that nobody uses. The trainer here sets the same environment variables and creates
the same process group; only the workers import PyTorch.

It also starts no actor for Ray Data's `datasets`: recipes read their data themselves.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

SHUTDOWN_S = 30.0
"""Seconds that workers have to leave the process group before their processes are ended."""

logger = logging.getLogger(__name__)


class LeanTrainer(DataParallelTrainer):
    """A trainer of Ray Train that starts no actor for Ray Data's `datasets`."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [each for each in callbacks if not isinstance(each, DatasetsCallback)]


@dataclass(frozen=True)
class ProcessGroup(BackendConfig):
    """The config of the process group of a run's workers."""

    backend: str
    """PyTorch's name of the backend, such as `gloo` or `cpu:gloo,cuda:nccl`."""
    timeout_s: float
    """The seconds after which a collective operation fails."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessGroupBackend

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "timeout_s": self.timeout_s}


class ProcessGroupBackend(Backend):
    """The part of the process group that Ray Train's controller runs."""

    share_cuda_visible_devices = True
    """NCCL needs the GPUs of all workers of a node to be visible to each of them."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(join, backend_config, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) == 1:
            return
        try:
            ray.get(worker_group.execute_async(leave), timeout=SHUTDOWN_S)
        except ray.exceptions.GetTimeoutError:
            logger.warning("the workers did not leave their process group in %g s", SHUTDOWN_S)
        except ray.exceptions.RayActorError:
            logger.info("a worker has ended before it left its process group")


# In the workers.


def join(group: ProcessGroup, address: str, port: int) -> None:
    """Set the environment variables of PyTorch's launcher, and join the process group.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    import ray.train.torch
    from torch import distributed

    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        # Accelerate would otherwise choose a device by LOCAL_RANK.
        "ACCELERATE_TORCH_DEVICE": str(ray.train.torch.get_device()),
    }
    if "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        # An operation that times out must end the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    distributed.init_process_group(group.backend, timeout=timedelta(seconds=group.timeout_s))


def leave() -> None:
    """Leave the process group, if this worker is still a member of one."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
