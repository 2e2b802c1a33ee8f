"""FSDP2: PyTorch shards a model over the workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trainyard_trainer.config.training.strategies import Fsdp2Config
from trainyard_trainer.parallel.torch_strategy import (
    TorchStrategy,
    compute_out_of_place,
    require_group,
)
from trainyard_trainer.parallel.worker import Worker

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The data types, by their names in the run file."""


class Fsdp2Strategy(TorchStrategy):
    """FSDP2 (`fully_shard`): each worker has a shard of each weight. The weights of one unit at a time are
    gathered for its forward and backward pass."""

    is_sharded = True
    shards_weights = True

    def __init__(
        self, options: Fsdp2Config, units_of: Callable[[nn.Module], Sequence[nn.Module]]
    ) -> None:
        self._options = options
        self._units_of = units_of

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """Shard the network in place. Its weights become DTensors, and are moved to the device by unit."""
        options = self._options
        require_group()
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        compute_out_of_place(network)
        mesh = init_device_mesh(worker.device.type, (worker.world_size,))
        dtype = DTYPES[options.param_dtype]
        for unit in (*self._units_of(network), network):
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=None if dtype == torch.float32 else dtype,
                    reduce_dtype=DTYPES[options.reduce_dtype],
                ),
                offload_policy=CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
            )
        return network

    def reshard(self, network: nn.Module) -> None:
        # The root module keeps its gathered weights for a backward pass, which a validation does not have.
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
