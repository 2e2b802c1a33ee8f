"""Build a model of Transformers with its adapter, and read its weights, or a worker's shard of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainyard_trainer.config.training.models import CausalModel, Lora
from trainyard_trainer.data.sources.tokens.tokenizer_folder import reason_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm.folder import (
    explained,
    read_config,
    require_causal,
    weight_files,
    without_progress_bars,
)
from trainyard_trainer.recipes.causal_lm.network import CausalNetwork
from trainyard_trainer.recipes.causal_lm.stored_weights import refuse_differences

if TYPE_CHECKING:
    from peft import LoraConfig

ATTENTION = {
    "auto": None,
    "eager": "eager",
    "sdpa": "sdpa",
    "flash": "flash_attention_2",
    "flex": "flex_attention",
}
"""Transformers' names of the values of `train.model.attention`; None leaves the choice to Transformers."""

ADAPTER = "default"
"""The name that an adapter has in the model."""

BASE_LAYER = ".base_layer"
"""The part of the name of a weight that has an adapter, which the file of the model lacks."""


def build_network(config: CausalModel, *, seed: int, is_sharded: bool) -> CausalNetwork:
    """Build the network with its weights, and with an adapter that changes nothing yet.

    If `is_sharded`, parameters are on the meta device until `load_shards`, where the model allows that.
    Raises ConfigError if the folder holds no such model.
    """
    is_meta = torch.get_default_device().type == "meta"
    if config.init == "random" or is_meta:
        model = _from_config(config)
    else:
        empty = _without_weights(config) if is_sharded else None
        model = _from_folder(config) if empty is None else empty
    model.train()
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if config.adapter is not None:
        add_adapter(model, config.adapter)
    network = CausalNetwork(model, is_flattened=config.attention == "flash")
    if not any(each.is_meta for each in network.parameters()):
        init_adapter(network, seed)
    return network


def _from_config(config: CausalModel) -> nn.Module:
    from transformers import AutoModelForCausalLM

    known = read_config(config.path)
    with explained(config.path):
        model: nn.Module = AutoModelForCausalLM.from_config(
            known,
            trust_remote_code=False,
            dtype=_dtype_of(config, known.dtype),
            attn_implementation=ATTENTION[config.attention],
        )
    require_causal(model, config.path)
    return model


def _from_folder(config: CausalModel) -> nn.Module:
    """Read all weights. Raises ConfigError if the folder lacks some, which would stay random."""
    from transformers import AutoModelForCausalLM

    known = read_config(config.path)
    weight_files(config.path)
    without_progress_bars()
    with explained(config.path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=known,
            dtype=_dtype_of(config, known.dtype),
            attn_implementation=ATTENTION[config.attention],
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, with names and shapes
        )
    model: nn.Module = loaded[0]
    require_causal(model, config.path)
    refuse_differences(config.path, loaded[1], sorted(loaded[1]["unexpected_keys"]))
    return model


def _dtype_of(config: CausalModel, stored: Any) -> torch.dtype:
    """Return the data type of the weights: float32 if they are trained, else that of the folder.

    Steps of the usual size vanish in the rounding of bf16.
    """
    dtype: torch.dtype = (stored or torch.float32) if config.adapter else torch.float32
    return dtype


# The adapter.


def add_adapter(model: nn.Module, lora: Lora) -> None:
    """Add an adapter in place, and freeze all other weights. Raises ConfigError for unknown targets."""
    from peft import inject_adapter_in_model

    if not isinstance(lora.targets, str):
        require_targets(model, lora.targets)
    with warnings.catch_warnings():
        # GPT-2 keeps its weights transposed, which PEFT notices by itself.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        try:
            inject_adapter_in_model(lora_config(lora, lora.targets), model, adapter_name=ADAPTER)
        except ValueError as error:  # such as a target that is a norm
            raise ConfigError(
                f"train.model.adapter cannot be added to this model: {reason_of(error)}"
            ) from error
    for name, parameter in model.named_parameters():
        is_adapter = ".lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()


def lora_config(lora: Lora, targets: str | Sequence[str]) -> LoraConfig:
    """Return the settings of an adapter as PEFT has them."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT takes any number
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def require_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Raise ConfigError for a target that is the end of no module's name."""
    ends = {
        name.rpartition(".")[2] for name, each in model.named_modules() if not [*each.children()]
    }
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = get_close_matches(target, ends, n=3) or sorted(ends)[:8]
            raise ConfigError(
                f"train.model.adapter.targets: the model has no module {target}. "
                f"It has {', '.join(near)}, or use all-linear."
            )


def init_adapter(network: nn.Module, seed: int) -> None:
    """Draw the adapter's first weights, the same at any number of workers: A at random, B zero.

    A is drawn as PEFT does, which is how PyTorch draws the weights of linear layers (Kaiming, uniform).
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".lora_A." in name or ".lora_embedding_B." in name:
                drawn = torch.empty(parameter.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                _copy_shard(parameter, drawn)
            elif ".lora_B." in name or ".lora_embedding_A." in name:
                _copy_shard(parameter, torch.zeros(parameter.shape))


# Shards.


def _without_weights(config: CausalModel) -> nn.Module | None:
    """Build the model without its weights, for `load_shards`; None if its weights have to be read in whole.

    That is so of models whose weights Transformers joins while it reads them, so that they have no place of
    their own in the files, and of DoRA, which begins with the lengths of whole rows.
    """
    if config.adapter is not None and config.adapter.dora:
        return None
    with meta_parameters():
        model = _from_config(config)
    stored = weight_files(config.path)
    is_loadable = all(any(name in stored for name in names) for names, _ in _parameters_of(model))
    return model if is_loadable else None


def load_shards(network: CausalNetwork, path: str, seed: int) -> None:
    """Read this worker's part of each weight into the network, whose parameters are on their device."""
    from safetensors import safe_open

    stored = weight_files(path)
    wanted: dict[str, Tensor] = {}
    for names, parameter in _parameters_of(network.model):
        if not any(".lora_" in name for name in names):
            wanted[next(name for name in names if name in stored)] = parameter
    with torch.no_grad():
        for file_path in sorted({stored[name] for name in wanted}):
            with safe_open(file_path, framework="pt") as file:
                for name, tensor in wanted.items():
                    if stored[name] == file_path:
                        _copy_shard(tensor, file.get_slice(name))
    init_adapter(network, seed)


def _parameters_of(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield each parameter with its names in files: several if the model uses it in several places."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(name.replace(BASE_LAYER, ""))
        parameters[id(each)] = each
    for key, found in parameters.items():
        yield names[key], found


def _copy_shard(parameter: Tensor, whole: Tensor) -> None:
    """Copy this worker's part of a tensor, or of a tensor in a file, into a parameter."""
    # Here, because these imports take a second, which the driver need not pay.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        parameter.copy_(whole[:])  # reads it, if it lies in a file
        return
    shape, start = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if all(shape):
        part = whole[
            tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        ]
        parameter.to_local().copy_(part)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build modules whose parameters have no storage, and whose buffers do: no file holds these."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # tied weights stay one parameter
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore
