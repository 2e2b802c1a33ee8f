"""How a model is spread over workers, and what the workers tell each other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

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
from typing_extensions import assert_never

from trainyard_trainer.config.strategies import DeepSpeedConfig, Fsdp2Config
from trainyard_trainer.config.train import Train

EXCHANGE_SAMPLE_STEPS = 20
"""DDP times one step in so many."""

UNIT_PARAMETERS = 10_000
"""Smaller blocks are gathered with what is around them: each exchange takes its time."""

BUCKET_PARAMETERS = 2**23
"""What DeepSpeed exchanges at once, and gathers ahead: 32 MiB of float32, about what DDP exchanges."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What carries exchanges, by the kind of a worker's device. Workers with GPUs also exchange what lies in host
memory: norms of shares that are offloaded, and the moving average's count."""

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
    """Each worker keeps something of the model alone: all take part in every pass, and in every save."""

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """The model whose backward pass exchanges gradients, around the network.

        That is on the worker's device; one that is to be shared out is in host memory, and moved by this.
        """

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as the loop is to use them: DeepSpeed makes one thing of the two."""

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Add up the gradients of one pass."""

    def clip(self, network: nn.Module, norm: float) -> None:
        """Shorten the gradients of a step, over all weights together, to this 2-norm."""

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backward passes in it only add up gradients, where each worker has room for all of them."""

    def sync_buffers(self, network: nn.Module, worker: Worker) -> None:
        """Give all workers the buffers of rank 0, before they validate or save their shares."""

    def reshard(self, network: nn.Module) -> None:
        """Give up, after a validation, what it has gathered."""

    def exchange_s(self, model: nn.Module) -> float:
        """Seconds per step for which the exchange was not hidden behind the backward pass."""


class TorchStrategy:
    """What torch itself does in the same way however the weights are spread."""

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self, network: nn.Module, norm: float) -> None:
        nn.utils.clip_grad_norm_(network.parameters(), norm, foreach=True)

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Each pass exchanges: gradients that wait for the last one are as large as the whole model."""
        return nullcontext()

    def sync_buffers(self, network: nn.Module, worker: Worker) -> None:
        broadcast_buffers(network, worker)

    def exchange_s(self, model: nn.Module) -> float:
        """It is not told apart from the steps."""
        return 0.0


class DdpStrategy(TorchStrategy):
    """A copy of the model on each worker; gradients are averaged."""

    is_sharded = False

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
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

    def reshard(self, network: nn.Module) -> None: ...

    def exchange_s(self, model: nn.Module) -> float:
        if not isinstance(model, DistributedDataParallel):
            return 0.0
        measured = model._get_ddp_logging_data()
        if "avg_backward_comm_time" not in measured:  # until a step has been timed
            return 0.0
        hidden = measured["avg_backward_compute_comm_overlap_time"]
        return max(measured["avg_backward_comm_time"] - hidden, 0) / 1e9


class Fsdp2Strategy(TorchStrategy):
    """A share of each weight on each worker (torch's `fully_shard`); the weights of one unit after the other
    are gathered for its forward and backward pass."""

    is_sharded = True

    def __init__(self, options: Fsdp2Config) -> None:
        self._options = options

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """The network itself: its weights are DTensors from now on, moved to the device block by block."""
        options = self._options
        _require_group()
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        _compute_out_of_place(network)
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

    def reshard(self, network: nn.Module) -> None:
        # The root keeps what it has gathered for a backward pass, which a validation has not.
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class ZeroStrategy(TorchStrategy):
    """DeepSpeed's ZeRO: on each worker a share of the optimiser, from stage 2 of gradients, with stage 3 of
    weights, too."""

    is_sharded = True

    def __init__(
        self, options: DeepSpeedConfig, *, clip_norm: float, dtype: torch.dtype | None
    ) -> None:
        """`clip_norm` 0 for none; `dtype` that of autocast, which DeepSpeed switches on and off itself."""
        self._options = options
        self._clip_norm = clip_norm
        self._dtype = dtype

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """The network itself: DeepSpeed takes it with its optimiser; of stage 3 in host memory until then."""
        if self._options.stage == 3:
            for buffer in network.buffers():
                buffer.data = buffer.to(worker.device)
        else:
            network.to(worker.device)
        _require_group()
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        _compute_out_of_place(network)
        return network

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """DeepSpeed's engine, and what moves its weights."""
        deepspeed = _deepspeed_on(worker.device)
        deepspeed.init_distributed(dist_init_required=False)
        # It wants one, and then takes the device that it is told.
        os.environ.setdefault("LOCAL_RANK", "0")
        settings = self._settings(sum(weight.numel() for weight in model.parameters()))
        if self._options.stage == 3:
            # Weight by weight: the engine itself would move the whole model first, which may have no room.
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=worker.device.index or 0),
            model=model,
            optimizer=optimizer,
            config=settings,
        )
        return engine, cast(torch.optim.Optimizer, ZeroOptimizer(engine))

    def _settings(self, parameters: int) -> dict[str, Any]:
        """What DeepSpeed calls its config."""
        options = self._options
        bucket = min(BUCKET_PARAMETERS, parameters)
        zero: dict[str, Any] = {
            "stage": options.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            # Of a model with fewer weights than these usually say, none would ever be given up. Ahead of each
            # module it gathers another bucket, as long as fewer are there than may live.
            "stage3_max_live_parameters": 2 * bucket,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": UNIT_PARAMETERS,
        }
        if options.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if options.offload == "all":
            zero["offload_param"] = {"device": "cpu"}
        return {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,  # SGD; the tests compare it with DDP
            "zero_force_ds_cpu_optimizer": False,  # torch's own needs no native op
            "train_micro_batch_size_per_gpu": 1,  # it only counts with it
            "managed_gradient_accumulation": False,  # a step ends where the loop says so
            "gradient_clipping": self._clip_norm,
            "torch_autocast": {
                "enabled": self._dtype is not None,
                "dtype": str(self._dtype or torch.bfloat16).removeprefix("torch."),
                "lower_precision_safe_modules": [],  # of what is exchanged none is rounded
            },
        }

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        model.backward(loss, scale_wrt_gas=False)  # type: ignore[operator]

    def clip(self, network: nn.Module, norm: float) -> None:
        """The engine does it, in its step."""

    def reshard(self, network: nn.Module) -> None: ...


class ZeroOptimizer:
    """The optimiser of DeepSpeed's engine: what a learner asks of one whose state is shared out."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        self._engine.step()


def _deepspeed_on(device: torch.device) -> ModuleType:
    """The library, which takes seconds to load."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    from deepspeed import git_version_info, ops

    # Of its native ops those that were built where it was installed: nothing is compiled when a run starts.
    ops.__compatible_ops__ = git_version_info.installed_ops
    return deepspeed


def _require_group() -> None:
    """A process group, if only of one worker."""
    if not distributed.is_initialized():
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)


def _compute_out_of_place(network: nn.Module) -> None:
    """Where weights are gathered, a block may return a view: changed in place, it loses its gradients."""
    for module in network.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's share of a tensor that is shared out, else the tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    share: torch.Tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO's, of a weight
    return share


def strategy_of(train: Train, dtype: torch.dtype | None) -> Strategy:
    """Build the strategy of `train.strategy`; `dtype` is the data type of autocast, if it is used."""
    match train.strategy:
        case "ddp":
            return DdpStrategy()
        case "fsdp2":
            return Fsdp2Strategy(train.fsdp2 or Fsdp2Config())
        case "deepspeed":
            options = train.deepspeed or DeepSpeedConfig()
            return ZeroStrategy(options, clip_norm=train.clip_norm or 0.0, dtype=dtype)
        case _:
            assert_never(train.strategy)


def broadcast_buffers(network: nn.Module, worker: Worker) -> None:
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
