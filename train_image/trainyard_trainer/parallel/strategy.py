"""Distribute a model over workers with DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

from trainyard_trainer.config.training.strategies import DeepSpeedConfig, Fsdp2Config
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.units import UNIT_PARAMETERS
from trainyard_trainer.parallel.waits import Waits
from trainyard_trainer.parallel.worker import Worker

EXCHANGE_SAMPLE_STEPS = 20
"""DDP measures the time of communication once in this number of steps."""

BUCKET_PARAMETERS = 2**23
"""The number of parameters that DeepSpeed exchanges or prefetches at once: 32 MiB of float32, as with DDP."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The data types, by their names in the run file."""


class Strategy(Protocol):
    """The interface of a strategy to distribute a model over workers."""

    is_sharded: bool
    """Whether each worker holds a part of the state, so that all must take part in passes and saves."""

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """Return the network, wrapped so that its backward pass exchanges gradients.

        The network is on the worker's device. If the strategy shards it, it is in host memory, and this
        method moves it to the device.
        """

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and the optimizer for the loop. DeepSpeed combines both in its engine."""

    def clear_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of the step before, or set them to 0 if their memory is used again."""

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Run the backward pass, and add its gradients to those of earlier passes of the step."""

    def clip(self, network: nn.Module, norm: float) -> None:
        """Clip the gradients of a step to this 2-norm, computed over all weights."""

    def scale_gradients(self, network: nn.Module, factor: torch.Tensor) -> None:
        """Multiply the gradients of a step, which all passes have added, by a scalar."""

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients without communication.

        Strategies whose workers do not hold all gradients communicate nevertheless.
        """

    def sync_buffers(self, network: nn.Module, worker: Worker) -> None:
        """Copy the buffers of rank 0 to all workers, before they validate or save shards."""

    def reshard(self, network: nn.Module) -> None:
        """Free the weights that were gathered for a validation."""

    def exchange_s(self, model: nn.Module) -> float:
        """Return the seconds per step of communication that did not overlap with the backward pass."""

    def last_exchange_s(self, model: nn.Module) -> float:
        """Return the same for the newest step that was measured, with the wait for slower workers."""


class TorchStrategy:
    """The methods that are the same for all strategies of PyTorch."""

    def clear_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

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


class DdpStrategy(TorchStrategy):
    """DDP: each worker has a copy of the model, and gradients are averaged."""

    is_sharded = False

    def __init__(self, *, accumulates: bool) -> None:
        """Store whether steps have several passes, so that DDP's buckets hold the gradients all the time.

        Otherwise passes without communication would have gradients of their own beside the buckets.
        """
        self._accumulates = accumulates

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        if worker.world_size == 1:
            return network
        if self._accumulates:
            _set_gradients_to_zero(network)
        model = _Ddp(
            network,
            waits=worker.waits,
            accumulates=self._accumulates,
            device_ids=[worker.device] if worker.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        model._set_ddp_runtime_logging_sample_rate(EXCHANGE_SAMPLE_STEPS)
        return model

    def clear_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(model, _Ddp):
            model.clear_gradients(optimizer)
        else:
            optimizer.zero_grad(set_to_none=True)

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def reshard(self, network: nn.Module) -> None: ...

    def exchange_s(self, model: nn.Module) -> float:
        return _unhidden_s(model, "avg_")

    def last_exchange_s(self, model: nn.Module) -> float:
        return _unhidden_s(model, "")


class _Ddp(DistributedDataParallel):
    """DDP that counts the time in which this worker waits for the buffers of rank 0.

    With `accumulates`, its buckets hold the gradients all the time.
    """

    def __init__(
        self, network: nn.Module, *, waits: Waits, accumulates: bool, **options: Any
    ) -> None:
        super().__init__(network, **options)
        self._waits = waits
        self._accumulates = accumulates
        self._has_stepped = False

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of the step before, or set them to 0 in the buckets."""
        if self._accumulates and self._has_stepped and not self._has_rebuilt_buckets:
            # The next forward pass arranges the buckets anew. This frees the old ones before.
            _set_gradients_to_zero(self.module)
        else:
            optimizer.zero_grad(set_to_none=not self._accumulates)
        self._has_stepped = True

    def _sync_buffers(self) -> None:
        with self._waits.counted(self.device):
            super()._sync_buffers()


def _set_gradients_to_zero(network: nn.Module) -> None:
    """Set gradients to 0 without memory of their own: DDP makes existing ones views of its buckets."""
    for weight in network.parameters():
        if weight.requires_grad:
            weight.grad = weight.new_zeros(()).expand_as(weight)


def _unhidden_s(model: nn.Module, prefix: str) -> float:
    """Return the seconds of communication that the backward pass did not hide, as DDP has measured them."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    measured = model._get_ddp_logging_data()
    if f"{prefix}backward_comm_time" not in measured:  # until a step has been measured
        return 0.0
    hidden = measured[f"{prefix}backward_compute_comm_overlap_time"]
    return max(measured[f"{prefix}backward_comm_time"] - hidden, 0) / 1e9


class Fsdp2Strategy(TorchStrategy):
    """FSDP2 (`fully_shard`): each worker has a shard of each weight. The weights of one unit at a time are
    gathered for its forward and backward pass."""

    is_sharded = True

    def __init__(
        self, options: Fsdp2Config, units_of: Callable[[nn.Module], Sequence[nn.Module]]
    ) -> None:
        self._options = options
        self._units_of = units_of

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """Shard the network in place. Its weights become DTensors, and are moved to the device by unit."""
        options = self._options
        _require_group()
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        _compute_out_of_place(network)
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


class ZeroStrategy(TorchStrategy):
    """DeepSpeed's ZeRO: each worker has a shard of the optimizer state, from stage 2 on also of the
    gradients, and in stage 3 also of the weights."""

    is_sharded = True

    def __init__(
        self, options: DeepSpeedConfig, *, clip_norm: float, dtype: torch.dtype | None
    ) -> None:
        """Store the options. A `clip_norm` of 0 disables clipping; `dtype` is for DeepSpeed's autocast."""
        self._options = options
        self._clip_norm = clip_norm
        self._dtype = dtype

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """Return the network. Stage 3 keeps it in host memory until `wrap_optimizer` creates the engine."""
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
        """Return DeepSpeed's engine and its optimizer."""
        deepspeed = _deepspeed_on(worker.device)
        deepspeed.init_distributed(dist_init_required=False)
        # DeepSpeed requires LOCAL_RANK, but uses the device that `args` specifies.
        os.environ.setdefault("LOCAL_RANK", "0")
        settings = self._settings(sum(weight.numel() for weight in model.parameters()))
        if self._options.stage == 3:
            # Shard weight by weight: the engine itself would first move the whole model, which may not fit.
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=worker.device.index or 0),
            model=model,
            optimizer=optimizer,
            config=settings,
        )
        return engine, cast(torch.optim.Optimizer, ZeroOptimizer(engine))

    def _settings(self, parameters: int) -> dict[str, Any]:
        """Return the config for DeepSpeed."""
        options = self._options
        bucket = min(BUCKET_PARAMETERS, parameters)
        zero: dict[str, Any] = {
            "stage": options.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            # With the defaults, a model with fewer weights than these limits would never free any. DeepSpeed
            # prefetches a bucket before each module while fewer than max_live_parameters are gathered.
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
            "zero_force_ds_cpu_optimizer": False,  # torch's optimizer needs no native op
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed uses it only for statistics
            "managed_gradient_accumulation": False,  # the loop decides when a step ends
            "gradient_clipping": self._clip_norm,
            "torch_autocast": {
                "enabled": self._dtype is not None,
                "dtype": str(self._dtype or torch.bfloat16).removeprefix("torch."),
                "lower_precision_safe_modules": [],  # exchanged values keep their precision
            },
        }

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        model.backward(loss, scale_wrt_gas=False)  # type: ignore[operator]

    def clip(self, network: nn.Module, norm: float) -> None:
        """Do nothing: the engine clips gradients in its step."""

    def scale_gradients(self, network: nn.Module, factor: torch.Tensor) -> None:
        """Raise ConfigError: the engine has divided the gradients among the workers already."""
        raise ConfigError(
            "train.strategy = deepspeed with train.micro_batch_size cannot train a recipe whose loss has a "
            "tensor as weight.\n       Remove micro_batch_size, use fsdp2, or define loss_weight in it."
        )

    def reshard(self, network: nn.Module) -> None: ...


class ZeroOptimizer:
    """An adapter with the methods of an optimizer for DeepSpeed's engine."""

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
    """Import DeepSpeed for a device and return it. The import takes seconds."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    from deepspeed import git_version_info, ops

    # Use only the native ops that were built at installation: nothing is compiled when a run starts.
    ops.__compatible_ops__ = git_version_info.installed_ops
    return deepspeed


def _require_group() -> None:
    """Initialise a process group of one worker, unless there is a process group already."""
    if not distributed.is_initialized():
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)


def _compute_out_of_place(network: nn.Module) -> None:
    """Disable in-place operations, because changing a view of gathered weights loses gradients."""
    for module in network.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's shard of a tensor, or the tensor itself if it is not sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    share: torch.Tensor = getattr(tensor, "ds_tensor", tensor)  # set by ZeRO stage 3
    return share


def strategy_of(
    train: Train,
    dtype: torch.dtype | None,
    units_of: Callable[[nn.Module], Sequence[nn.Module]],
    *,
    accumulates: bool = False,
) -> Strategy:
    """Build the strategy of `train.strategy`.

    `dtype` is the data type of autocast, if it is used. `units_of` returns the modules of a network whose
    weights FSDP2 gathers together, the inner ones first. `accumulates` tells that steps have several passes.
    """
    match train.strategy:
        case "ddp":
            return DdpStrategy(accumulates=accumulates)
        case "fsdp2":
            return Fsdp2Strategy(train.fsdp2 or Fsdp2Config(), units_of)
        case "deepspeed":
            options = train.deepspeed or DeepSpeedConfig()
            return ZeroStrategy(options, clip_norm=train.clip_norm or 0.0, dtype=dtype)
        case _:
            assert_never(train.strategy)


def broadcast_buffers(network: nn.Module, worker: Worker) -> None:
    """Copy the buffers of rank 0 to all workers, whose batch norm statistics may differ."""
    if worker.world_size > 1:
        for buffer in network.buffers():
            distributed.broadcast(buffer, src=0)
