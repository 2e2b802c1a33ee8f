"""The sizes of a language model of Transformers, and the number of its parameters, from its `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class UnknownShape(Exception):
    """The `config.json` describes a model whose sizes this module does not know; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A linear layer of a block."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool
    reads: str
    """What the layer multiplies. Layers of a block that read the same are computed from one tensor."""

    @property
    def weights(self) -> int:
        """The number of weights, without the bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model whose blocks are all alike."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    inner_size: int
    """The width between the layers of a block's feed-forward network."""
    projections: tuple[Projection, ...]
    """The linear layers of a block."""
    vectors: int
    """The number of parameters of a block's norms."""
    learnt_positions: int = 0
    """The number of learnt vectors for positions; 0 for rotary positions."""
    final_norm: int
    """The number of parameters of the norm behind the last block."""
    is_tied: bool
    """Whether the output layer uses the weights of the embedding."""
    has_layer_norm: bool = False
    """Whether it has LayerNorm and an unfused GELU, as GPT-2; else RMSNorm and a gate."""
    has_head_norms: bool = False
    """Whether queries and keys are normalised by head, as in Qwen3."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    window: int | None = None
    """The number of tokens that each token sees, if it is limited."""
    weight_bytes: int
    """The size of a number of the stored weights."""

    @property
    def table(self) -> int:
        """The number of weights of the embedding, which is also that of an untied output layer."""
        return self.vocab_size * self.width

    @property
    def block(self) -> int:
        """The number of parameters of a block."""
        biases = sum(each.outputs for each in self.projections if each.has_bias)
        return sum(each.weights for each in self.projections) + biases + self.vectors

    @property
    def outside(self) -> int:
        """The number of parameters outside of the blocks."""
        tables = self.table if self.is_tied else 2 * self.table
        return tables + self.learnt_positions * self.width + self.final_norm

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.layers * self.block + self.outside


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The size of a number of each data type of weights."""


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of the model of a `config.json`. Raises UnknownShape for other kinds of models."""
    kind = str(config.get("model_type"))
    build = FAMILIES.get(kind)
    if build is None:
        raise UnknownShape(
            f"its kind is {kind}, and the sizes of {', '.join(sorted(FAMILIES))} are known"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPE_BYTES:
        raise UnknownShape(f"its weights have the data type {dtype}")
    if config.get("quantization_config"):
        raise UnknownShape("its weights are quantised")
    try:
        return build(config, DTYPE_BYTES[dtype])
    except (KeyError, TypeError) as error:
        raise UnknownShape(
            f"its config.json lacks a size, or has no number for it: {error}"
        ) from None


def _gpt2(config: Mapping[str, Any], weight_bytes: int) -> ModelShape:
    width = config["n_embd"]
    inner = config.get("n_inner") or 4 * width

    def projection(name: str, inputs: int, outputs: int, reads: str) -> Projection:
        return Projection(name=name, inputs=inputs, outputs=outputs, has_bias=True, reads=reads)

    return ModelShape(
        vocab_size=config["vocab_size"],
        width=width,
        layers=config["n_layer"],
        heads=config["n_head"],
        key_value_heads=config["n_head"],
        head_size=width // config["n_head"],
        inner_size=inner,
        projections=(
            projection("attn.c_attn", width, 3 * width, "block"),
            projection("attn.c_proj", width, width, "attention"),
            projection("mlp.c_fc", width, inner, "middle"),
            projection("mlp.c_proj", inner, width, "inner"),
        ),
        vectors=4 * width,
        learnt_positions=config["n_positions"],
        final_norm=2 * width,
        is_tied=config.get("tie_word_embeddings", True),
        has_layer_norm=True,
        attention_dropout=config.get("attn_pdrop", 0.1),
        residual_dropout=config.get("resid_pdrop", 0.1),
        weight_bytes=weight_bytes,
    )


def _gated(
    *,
    biases: Callable[[Mapping[str, Any]], tuple[bool, bool, bool]],
    head_size: int | None = None,
    is_tied: bool = False,
    has_head_norms: bool = False,
    is_fused: bool = False,
    window: int | None = None,
) -> Callable[[Mapping[str, Any], int], ModelShape]:
    """Return what builds the shape of a model with RMSNorm, rotary positions and a gate.

    `biases` returns whether queries, keys and values have a bias, the output of the attention, and the
    feed-forward network. The other arguments are the defaults of the model's keys.
    """

    def build(config: Mapping[str, Any], weight_bytes: int) -> ModelShape:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        inner, pairs = config["intermediate_size"], config.get("num_key_value_heads") or heads
        size = config.get("head_dim") or head_size or width // heads
        in_bias, out_bias, inner_bias = biases(config)

        def projection(
            name: str, inputs: int, outputs: int, has_bias: bool, reads: str
        ) -> Projection:
            return Projection(
                name=name, inputs=inputs, outputs=outputs, has_bias=has_bias, reads=reads
            )

        query, key = heads * size, pairs * size
        inputs: tuple[Projection, ...]
        if is_fused:
            inputs = (
                projection("self_attn.qkv_proj", width, query + 2 * key, in_bias, "block"),
                projection("mlp.gate_up_proj", width, 2 * inner, inner_bias, "middle"),
            )
        else:
            inputs = (
                projection("self_attn.q_proj", width, query, in_bias, "block"),
                projection("self_attn.k_proj", width, key, in_bias, "block"),
                projection("self_attn.v_proj", width, key, in_bias, "block"),
                projection("mlp.gate_proj", width, inner, inner_bias, "middle"),
                projection("mlp.up_proj", width, inner, inner_bias, "middle"),
            )
        has_window = config.get("use_sliding_window", True)
        return ModelShape(
            vocab_size=config["vocab_size"],
            width=width,
            layers=config["num_hidden_layers"],
            heads=heads,
            key_value_heads=pairs,
            head_size=size,
            inner_size=inner,
            projections=(
                *inputs,
                projection("self_attn.o_proj", query, width, out_bias, "attention"),
                projection("mlp.down_proj", inner, width, inner_bias, "inner"),
            ),
            vectors=2 * width + (2 * size if has_head_norms else 0),
            final_norm=width,
            is_tied=config.get("tie_word_embeddings", is_tied),
            has_head_norms=has_head_norms,
            attention_dropout=config.get("attention_dropout") or 0.0,
            residual_dropout=config.get("resid_pdrop") or 0.0,
            window=config.get("sliding_window", window) if has_window else None,
            weight_bytes=weight_bytes,
        )

    return build


def _attention_bias(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    has_bias = bool(config.get("attention_bias"))
    return has_bias, has_bias, bool(config.get("mlp_bias"))


FAMILIES: dict[str, Callable[[Mapping[str, Any], int], ModelShape]] = {
    "gemma": _gated(biases=_attention_bias, head_size=256, is_tied=True),
    "gpt2": _gpt2,
    "llama": _gated(biases=_attention_bias),
    "mistral": _gated(biases=lambda _: (False, False, False), window=4096),
    "phi3": _gated(biases=lambda _: (False, False, False), is_fused=True),
    "qwen2": _gated(biases=lambda _: (True, False, False)),
    "qwen3": _gated(biases=_attention_bias, head_size=128, has_head_norms=True),
}
"""What builds the shape of each kind of model, by the `model_type` of its `config.json`."""
