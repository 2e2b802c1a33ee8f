"""What the strategies to distribute a model over workers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker


class TorchStrategy:
    """The methods that are the same for all strategies of PyTorch."""

    def clear_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return state_tensors(optimizer, weights_of(optimizer))

    def make_optimizer_state(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        weights = [weight for each in optimizers for weight in weights_of(each)]
        # PyTorch makes none where there are gradients, which DDP's buckets may hold from the beginning.
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        get_optimizer_state_dict(network, list(optimizers))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self, network: nn.Module, norm: float) -> None:
        nn.utils.clip_grad_norm_(network.parameters(), norm, foreach=True)

    def scale_gradients(self, network: nn.Module, factor: torch.Tensor) -> None:
        for weight in network.parameters():
            if weight.grad is not None:
                gradient = local_shard(weight.grad)
                gradient.mul_(factor.to(gradient))

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that does not change anything: accumulated full gradients need too much memory."""
        return nullcontext()

    def sync_buffers(self, network: nn.Module, worker: Worker) -> None:
        broadcast_buffers(network, worker)

    def exchange_s(self, model: nn.Module) -> float:
        """Return 0: the time of communication is not measured."""
        return 0.0

    def last_exchange_s(self, model: nn.Module) -> float:
        """Return 0: the time of communication is not measured."""
        return 0.0


def weights_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the weights that an optimizer trains."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def state_tensors(
    optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the state that an optimizer keeps for these weights. Raises ConfigError if it is no tensor."""
    state = [
        (name, value)
        for weight in weights
        for name, value in sorted(optimizer.state.get(weight, {}).items())
    ]
    for name, value in state:
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"the optimizer keeps {name} = {value!r} for a weight, which is not a tensor: "
                "faults.keep_state can keep only tensors in memory. Remove it, or use another optimizer."
            )
    return [value for _, value in state]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's shard of a tensor, or the tensor itself if it is not sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    share: torch.Tensor = getattr(tensor, "ds_tensor", tensor)  # set by ZeRO stage 3
    return share


def broadcast_buffers(network: nn.Module, worker: Worker) -> None:
    """Copy the buffers of rank 0 to all workers, whose batch norm statistics may differ."""
    if worker.world_size > 1:
        for buffer in network.buffers():
            distributed.broadcast(buffer, src=0)


def require_group() -> None:
    """Initialise a process group of one worker, unless there is a process group already."""
    if not distributed.is_initialized():
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)


def compute_out_of_place(network: nn.Module) -> None:
    """Disable in-place operations, because changing a view of gathered weights loses gradients."""
    for module in network.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
