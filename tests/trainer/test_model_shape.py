"""The number of parameters that follows from a model's config.json is that of the real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainyard_trainer.config.memory.model_shape import UnknownShape, model_shape

TINY = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "pad_token_id": None,
}

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "llama, tied, with biases": {
        "model_type": "llama",
        **TINY,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", **TINY},
    "mistral, own head size": {"model_type": "mistral", **TINY, "head_dim": 32},
    "phi3": {"model_type": "phi3", **TINY},
    "gemma": {"model_type": "gemma", **TINY, "head_dim": 16},
    "gemma, its own head size": {"model_type": "gemma", **TINY},
    "qwen2": {"model_type": "qwen2", **TINY},
    "qwen2, tied": {"model_type": "qwen2", **TINY, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **TINY, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 96, "n_layer": 3, "n_head": 6}
    | {"n_positions": 512},
    "gpt2, untied": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 96, "n_layer": 3}
    | {"n_head": 6, "n_positions": 512, "n_inner": 100, "tie_word_embeddings": False},
    "llama of 8 thousand million": LLAMA_8B,
    "qwen2 of half a thousand million": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    config = CONFIGS[name]
    known = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    shape = model_shape(config)
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    body = getattr(model, model.base_model_prefix)
    blocks = body.h if config["model_type"] == "gpt2" else body.layers
    assert shape.block == sum(each.numel() for each in blocks[0].parameters())
    layers = {
        name: each
        for name, each in blocks[0].named_modules()
        if any(name == projection.name for projection in shape.projections)
    }
    assert {name: each.weight.numel() for name, each in layers.items()} == {
        each.name: each.weights for each in shape.projections
    }


def test_a_folder_as_transformers_writes_it_has_the_same_shape() -> None:
    for name, config in CONFIGS.items():
        known = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        assert model_shape(known.to_diff_dict()) == model_shape(config), name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mixtral"}, "its kind is mixtral, and the sizes of gemma, gpt2"),
        ({"hidden_size": None}, "lacks a size, or has no number"),
        ({"torch_dtype": "float8_e4m3fn"}, "data type float8_e4m3fn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "are quantised"),
    ],
)
def test_other_models_are_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownShape, match=reason):
        model_shape({**LLAMA_8B, **changes})
