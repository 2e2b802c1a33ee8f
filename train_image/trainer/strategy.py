"""How a model is spread over workers, and what the workers tell each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer import config as wanted

EXCHANGE_SAMPLE_STEPS = 20
"""DDP times one step in so many."""

UNIT_PARAMETERS = 10_000
"""Smaller blocks are gathered with what is around them: each exchange takes its time."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process of a run. With more than one, torch's process group is up before the loop starts."""

    rank: int = 0
    world_size: int = 1
    device: torch.device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all workers, in place."""
        if self.world_size > 1:
            distributed.all_reduce(values)
        return values

    def from_rank_zero(self, value: Any) -> Any:
        """What rank 0 passed here, on every worker."""
        if self.world_size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, device=self.device)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """What each worker passed here, by rank, on every worker."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values


class Strategy(Protocol):
    """What the loop asks of `ddp`, and of whatever comes beside it."""

    is_sharded: bool
    """Each worker has a share of the weights alone: all take part in every pass, and in every save."""

    def wrap(self, network: nn.Module, worker: Worker) -> nn.Module:
        """The model whose backward pass exchanges gradients, around the network on the worker's device."""

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backward passes in it only add up gradients."""

    def agree(self, network: nn.Module, worker: Worker) -> None:
        """Give all workers the same buffers, before they validate or save."""

    def rest(self, network: nn.Module) -> None:
        """Give up, after a validation, what it has gathered."""

    def exchange_s(self, model: nn.Module) -> float:
        """Seconds per step for which the exchange was not hidden behind the backward pass."""


class Ddp:
    """A copy of the model on each worker; gradients are averaged."""

    is_sharded = False

    def wrap(self, network: nn.Module, worker: Worker) -> nn.Module:
        if worker.world_size == 1:
            return network
        model = DistributedDataParallel(
            network,
            device_ids=[worker.device] if worker.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        model._set_ddp_runtime_logging_sample_rate(EXCHANGE_SAMPLE_STEPS)
        return model

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def agree(self, network: nn.Module, worker: Worker) -> None:
        agree_on_buffers(network, worker)

    def rest(self, network: nn.Module) -> None: ...

    def exchange_s(self, model: nn.Module) -> float:
        if not isinstance(model, DistributedDataParallel):
            return 0.0
        measured = model._get_ddp_logging_data()
        if "avg_backward_comm_time" not in measured:  # until a step has been timed
            return 0.0
        hidden = measured["avg_backward_compute_comm_overlap_time"]
        return max(measured["avg_backward_comm_time"] - hidden, 0) / 1e9


class Fsdp2:
    """A share of each weight on each worker (torch's `fully_shard`); the weights of one unit after the other
    are gathered for its forward and backward pass."""

    is_sharded = True

    def __init__(self, options: wanted.Fsdp2) -> None:
        self._options = options

    def wrap(self, network: nn.Module, worker: Worker) -> nn.Module:
        """The network itself: its weights are DTensors from now on."""
        options = self._options
        if not distributed.is_initialized():
            # A group of one, which takes checkpoints of larger ones all the same.
            distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)
        # What a block returns may be a view: changed in place, it would lose its gradients.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for module in network.modules():
            if hasattr(module, "inplace"):
                module.inplace = False
        mesh = init_device_mesh(worker.device.type, (worker.world_size,))
        dtype = DTYPES[options.param_dtype]
        for unit in (*units(network), network):
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

    @contextmanager
    def without_exchange(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def agree(self, network: nn.Module, worker: Worker) -> None:
        agree_on_buffers(network, worker)

    def rest(self, network: nn.Module) -> None:
        # The root keeps what it has gathered for a backward pass, which a validation has not.
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def exchange_s(self, model: nn.Module) -> float:
        """Nobody measures it."""
        return 0.0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's share of a tensor that is shared out, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def strategy_of(train: wanted.Train) -> Strategy:
    return Fsdp2(train.fsdp2 or wanted.Fsdp2()) if train.strategy == "fsdp2" else Ddp()


def agree_on_buffers(network: nn.Module, worker: Worker) -> None:
    """Batch norm statistics are of a worker's own last batch until the next forward pass."""
    if worker.world_size > 1:
        for buffer in network.buffers():
            distributed.broadcast(buffer, src=0)


def units(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of which a network is a row: what lies in its sequences and lists, and is large enough."""
    for name, module in network.named_children():
        if _is_row(module):
            yield from units(module)
        elif _is_row(network) and name:
            if sum(each.numel() for each in module.parameters()) >= UNIT_PARAMETERS:
                yield module
        else:
            yield from units(module)


def _is_row(module: nn.Module) -> bool:
    return type(module) in (nn.Sequential, nn.ModuleList)
