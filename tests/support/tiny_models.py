"""Tiny language models of Transformers with random weights, and their tokenizers, made without a download.

A folder that `make_folder` writes loads as any other: `AutoModelForCausalLM`, `AutoTokenizer`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Kind = Literal["gpt2", "llama", "qwen2", "qwen3"]

VOCAB_SIZE = 2048

CONTEXT_LENGTH = 512
"""The number of positions of each model."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

TEXT_FILES = 60
"""The number of modules of the standard library on which the tokenizer is trained."""

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template that marks what the assistant says."""

PLAIN_TEMPLATE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same chat template without the marks."""

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template that knows tools, and that marks what the assistant says."""


@cache
def _trained_bpe(vocab_size: int) -> str:
    """Return a byte-level BPE, trained on the standard library, as the text of tokenizer.json."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(_texts(), trainer)
    return bpe.to_str()


def _texts() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:TEXT_FILES]:
        yield file.read_text(errors="ignore")


def make_tokenizer(
    vocab_size: int = VOCAB_SIZE, *, template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    """Make a tokenizer; `template` is its chat template, or None for none."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe(vocab_size)),
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=CONTEXT_LENGTH,
        chat_template=template,
    )


def make_config(
    kind: Kind,
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    tied: bool = True,
    dropout: float = 0.0,
) -> PretrainedConfig:
    """Make the config of a model whose vocabulary is that of the tokenizer."""
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "gpt2":
        return GPT2Config(
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=CONTEXT_LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            tie_word_embeddings=tied,
            **ids,
        )
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
    own = {"head_dim": width // heads} if kind == "qwen3" else {}
    return config(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        **own,
        **ids,
    )


def make_folder(
    path: Path | str,
    kind: Kind = "llama",
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    template: str | None = TEMPLATE,
    max_shard_size: str = "50GB",
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    tied: bool = True,
    dropout: float = 0.0,
) -> Path:
    """Write a model with random weights and its tokenizer into a folder, and return the folder.

    `max_shard_size="300KB"` with `width=96, layers=4, tied=False` writes ten files of weights.
    """
    tokenizer = make_tokenizer(vocab_size, template=template)
    config = make_config(
        kind, tokenizer, width=width, layers=layers, heads=heads, tied=tied, dropout=dropout
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(path)
    return Path(path)


def make_tokenizer_folder(
    path: Path | str, *, vocab_size: int = VOCAB_SIZE, template: str | None = TEMPLATE
) -> Path:
    """Write a tokenizer alone into a folder, and return the folder."""
    make_tokenizer(vocab_size, template=template).save_pretrained(path)
    return Path(path)
