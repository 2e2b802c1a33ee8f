"""Write a trained model as a folder that Transformers, PEFT and servers read: its weights, or its adapter."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainyard_trainer.config.training.models import Lora
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm.folder import without_progress_bars
from trainyard_trainer.recipes.causal_lm.model_folder import ModelFolder
from trainyard_trainer.recipes.causal_lm.network import CausalNetwork
from trainyard_trainer.recipes.causal_lm.recipe import CausalLanguage
from trainyard_trainer.recipes.causal_lm.weights import ADAPTER, lora_config
from trainyard_trainer.versions import versions

if TYPE_CHECKING:
    from peft import LoraConfig

COPIED = (
    *(
        "tokenizer*",
        "*.jinja",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("*.tiktoken", "spiece.model", "generation_config.json", "LICENSE*", "NOTICE*"),
)
"""The files of a model's folder that belong to its fine-tuned model, too."""

SHARD_SIZE = "5GB"
"""The largest size of a file of weights."""

MODE = 0o644
"""The permissions of each file. safetensors lets only the owner read what it writes."""

NAME_IN_PEFT = "base_model.model."
"""The beginning of the names of weights in an adapter's file, as PEFT writes it."""


def write_adapter(
    folder: Path,
    recipe: CausalLanguage,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Write the adapter as `PeftModel.from_pretrained` reads it. Raises ConfigError without an adapter."""
    from safetensors.torch import save_file

    if recipe.config.adapter is None:
        raise ConfigError(
            f"{facts['run']} has trained all weights, and has no adapter: remove --adapter"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _config_of_adapter(recipe.config.adapter, weights, recipe.model).save_pretrained(str(folder))
    tensors = {_name_in_peft(name): each.contiguous() for name, each in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    _finish(folder, recipe, facts, library="peft")


def _config_of_adapter(lora: Lora, names: Iterable[str], base: ModelFolder) -> LoraConfig:
    """Return the settings for PEFT, with the names of the modules that `all-linear` stands for."""
    ends = {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
    found = lora_config(lora, sorted(ends) if isinstance(lora.targets, str) else lora.targets)
    found.base_model_name_or_path, found.revision = base.hub_name or (base.path, None)
    found.inference_mode = True
    return found


def _name_in_peft(name: str) -> str:
    return NAME_IN_PEFT + name.removeprefix("model.").replace(f".{ADAPTER}.", ".")


def write_model(
    folder: Path, recipe: CausalLanguage, network: nn.Module, facts: Mapping[str, Any]
) -> None:
    """Write all weights, with the adapter merged into them, as `AutoModelForCausalLM` reads them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert isinstance(network, CausalNetwork)
    model: Any = network.model
    for name, module in [*model.named_modules()]:
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    folder.mkdir(parents=True, exist_ok=True)
    without_progress_bars()
    # Transformers asks DeepSpeed about the model, which otherwise warns that there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    _finish(folder, recipe, facts, library="transformers")


def _finish(
    folder: Path, recipe: CausalLanguage, facts: Mapping[str, Any], *, library: str
) -> None:
    """Copy the tokenizer and what else belongs to the model, write its card, and open all files for all."""
    source = Path(recipe.model.without_weights())
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(model_card(recipe, facts, library=library), encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(MODE)


def model_card(recipe: CausalLanguage, facts: Mapping[str, Any], *, library: str) -> str:
    """Return a model card in the format of the Hugging Face Hub; the licence is left to the user."""
    config, base = recipe.config, recipe.model.name
    trained, lora = facts["trained"], config.adapter
    rows = {
        "base model": f"{base} ({config.init} weights)",
        "adapter": f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}" if lora else "none: all weights",
        "run, checkpoint": f"{facts['run']}, {facts['checkpoint']}",
        "data": facts["source"],
        "SHA-256 of the data": f"{facts['tokens']['rows_sha256']} (tokens and learnt tokens)",
        **{name.replace("_", " "): value for name, value in trained.items()},
        **versions(("torch", "transformers", "peft")),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nbase_model: {json.dumps(base)}\nlibrary_name: {library}\npipeline_tag: text-generation\n"
        "# Fill in the licence; that of the base model applies to this model, too.\nlicense: other\n---\n\n"
        f"# {facts['run']}\n\n| | |\n|---|---|\n{table}\n"
    )
