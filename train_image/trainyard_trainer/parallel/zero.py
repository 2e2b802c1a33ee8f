"""ZeRO: DeepSpeed shards the optimizer state of a model over the workers, and more in higher stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from trainyard_trainer.config.training.strategies import DeepSpeedConfig
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.torch_strategy import (
    TorchStrategy,
    compute_out_of_place,
    local_shard,
    require_group,
    state_tensors,
)
from trainyard_trainer.parallel.units import UNIT_PARAMETERS
from trainyard_trainer.parallel.worker import Worker

BUCKET_PARAMETERS = 2**23
"""The number of parameters that DeepSpeed exchanges or prefetches at once: 32 MiB of float32, as with DDP."""


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
        self.shards_weights = options.stage == 3

    def wrap_model(self, network: nn.Module, worker: Worker) -> nn.Module:
        """Return the network. Stage 3 keeps it in host memory until `wrap_optimizer` creates the engine."""
        if self._options.stage == 3:
            for buffer in network.buffers():
                buffer.data = buffer.to(worker.device)
        else:
            network.to(worker.device)
        require_group()
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        compute_out_of_place(network)
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
            zero_padding(model, worker)
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
        # Stages 1 and 2 take no odd size.
        bucket = min(BUCKET_PARAMETERS, parameters + parameters % 2)
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

    def optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return cast(ZeroOptimizer, optimizer).tensors()

    def make_optimizer_state(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        for each in optimizers:
            cast(ZeroOptimizer, each).make_state()

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

    def tensors(self) -> list[torch.Tensor]:
        """Return this worker's copies of weights, and the state that the optimizer keeps for them."""
        zero, copies = self._engine.optimizer, self._copies()
        state = state_tensors(zero.optimizer, copies)
        if self._engine.zero_optimization_stage() == 3:
            # Without offload, they are the shards of the weights themselves.
            shards = {id(each) for each in zero.fp16_partitioned_groups_flat}
            copies = [each for each in copies if id(each) not in shards]
        return [*copies, *state]

    def make_state(self) -> None:
        """Make the state by a step without gradients, if there is none."""
        zero = self._engine.optimizer
        for group, copy in enumerate(self._copies()):
            if copy in zero.optimizer.state:
                continue
            gradient = copy.grad
            copy.grad = torch.zeros_like(copy)
            zero._optimizer_step(group)
            copy.grad = gradient

    def _copies(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates: flat copies of this worker's part of the weights."""
        zero = self._engine.optimizer
        copies: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat
            if self._engine.zero_optimization_stage() == 3
            else zero.single_partition_of_fp32_groups
        )
        return copies


def zero_padding(model: nn.Module, worker: Worker) -> None:
    """Set to 0 what the shards of a model have behind the end of their weights.

    DeepSpeed makes all shards of a weight equally long and leaves their ends uninitialised, so they could be
    NaN: the run would seem to have diverged.
    """
    for weight in model.parameters():
        shard = local_shard(weight).detach()
        size = cast(Any, weight).ds_numel
        shard[max(size - worker.rank * shard.numel(), 0) :].zero_()


def _deepspeed_on(device: torch.device) -> ModuleType:
    """Import DeepSpeed for a device and return it. The import takes seconds."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    from deepspeed import git_version_info, ops

    # Use only the native ops that were built at installation: nothing is compiled when a run starts.
    ops.__compatible_ops__ = git_version_info.installed_ops
    return deepspeed
