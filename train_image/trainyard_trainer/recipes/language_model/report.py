"""What `language_model` brings to the report: bits per byte or perplexity, and text that it has written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainyard_trainer.checkpointing.files import load_tensors
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.train import LanguageModel
from trainyard_trainer.data.loading.shard_rows import ShardRows
from trainyard_trainer.data.prepared import Prepared, StreamCounts, TokenStreamInfo
from trainyard_trainer.data.sources.tokens.token_files import TokenShards
from trainyard_trainer.data.stored_rows import read_validation
from trainyard_trainer.recipes.language_model.codec import codec_of
from trainyard_trainer.recipes.language_model.generation import continued
from trainyard_trainer.recipes.language_model.model import Transformer, Vocabulary, title_of
from trainyard_trainer.report import elements
from trainyard_trainer.report.page import RecipeReport, Tile
from trainyard_trainer.run_folder.folder import RunFolder

TEMPERATURES = (0.7, 1.0)
"""Near what is likeliest, and as the model has learnt it."""

TEXTS = 3
"""Of each temperature."""

LENGTH_BYTES, LENGTH_TOKENS = 240, 80
"""Bytes or tokens of a text, at most."""


def find(
    folder: RunFolder,
    config: TrainerConfig,
    data: Prepared | TokenShards,
    vocabulary: Vocabulary,
    summary: dict[str, Any],
    validation: dict[str, Any],
) -> RecipeReport:
    assert isinstance(config.train, LanguageModel)
    model = config.train.model
    tokens, mfu = summary["tokens_per_s"], summary.get("mfu")
    seen = summary["samples_seen"] * model.context_length
    loss, unit = validation["loss"], "token" if model.has_tokens else "byte"
    bits = bits_per_byte(loss, data)
    can_write = model.tokenizer is not None or not model.has_tokens
    own = written_by_model(folder, config.train, data, vocabulary) if can_write else None
    return RecipeReport(
        title=title_of(model),
        result=Tile(
            "validation perplexity" if bits is None else "validation bits per byte",
            perplexity(loss) if bits is None else f"{bits:.3f}",
            f"next {unit} right: {validation['accuracy']:.2%}",
        ),
        speed=(
            Tile("tokens per second", f"{tokens:,.0f}", f"{mfu:.1%} MFU" if mfu else ""),
            Tile("tokens seen", f"{seen:,}", f"in {elements.count(summary['steps'], 'step')}"),
        ),
        sections=(("What it writes", own),) if own else (),
        facts=(
            ("training rows", f"{data.num_train:,}"),
            ("validation rows", f"{data.num_valid:,}"),
            (
                "a row",
                f"{model.context_length:,} {'tokens' if model.has_tokens else 'bytes, each a token'}, "
                "and the one before them",
            ),
            ("validation loss", f"{loss:.4f} nats per {unit}"),
            *(token_facts(data, loss) if model.has_tokens else ()),
        ),
    )


def written_by_model(
    folder: RunFolder,
    train: LanguageModel,
    data: Prepared | TokenShards,
    vocabulary: Vocabulary,
) -> str:
    """Return the texts that the delivered model writes behind a piece of validation text."""
    model = train.model
    network = Transformer(model, vocabulary).eval()
    network.load_state_dict(load_tensors(folder, folder.model))
    codec = codec_of(folder, model)
    prompt = codec.prompt_of(first_row(data), model.context_length // 2)
    written = []
    for temperature in TEMPERATURES:
        found = continued(
            network,
            prompt,
            count=TEXTS,
            length=LENGTH_TOKENS if model.has_tokens else LENGTH_BYTES,
            context_length=model.context_length,
            temperature=temperature,
            seed=train.seed,
            separator=vocabulary.separator,
        )
        written.append((temperature, [codec.decode(text) for text in found]))
    return texts(codec.decode(prompt), written)


def first_row(data: Prepared | TokenShards) -> list[int]:
    """Return the tokens of the first validation row."""
    if isinstance(data, TokenShards):
        return list(ShardRows(data, "valid")[np.zeros(1, np.int64)]["tokens"][0].tolist())
    (column,) = data.info.columns
    return list(read_validation(data, [0], column)[0].tolist())


def bits_per_byte(loss: float, data: Prepared | TokenShards) -> float | None:
    """Return a loss in nats per token as bits per byte of the validation text, whatever the tokens are.

    It is None for files of tokens, whose text is not known.
    """
    info = data.info
    if not isinstance(info, TokenStreamInfo):
        return loss / math.log(2)
    if info.valid.bytes is None:
        return None
    return loss / math.log(2) * info.valid.tokens / info.valid.bytes


def perplexity(loss: float) -> str:
    """Return e to the power of the loss per token, as text."""
    return f"{math.exp(min(loss, 700)):.4g}"


def token_facts(data: Prepared | TokenShards, loss: float) -> list[tuple[str, str]]:
    """Return what the report says of tokens."""
    info = data.info
    assert isinstance(info, TokenStreamInfo)
    return [
        ("validation perplexity", f"{perplexity(loss)} per token"),
        ("vocabulary", f"{info.vocab_size:,} tokens of {info.tokenizer or info.source}"),
        ("training text", size_of_text(info.train)),
        ("validation text", size_of_text(info.valid)),
    ]


def size_of_text(counts: StreamCounts) -> str:
    """Return the size of a split in words."""
    if counts.bytes is None or counts.documents is None:
        return f"{counts.tokens:,} tokens"
    return (
        f"{counts.tokens:,} tokens of {counts.bytes:,} bytes, "
        f"{elements.count(counts.documents, 'document')}"
    )


def texts(prompt: bytes, written: Sequence[tuple[float, Sequence[bytes]]]) -> str:
    """The prompt from validation text in soft letters, and what the model has put behind it."""
    shown = prompt.decode(errors="replace")
    return elements.written(
        (f"temperature {temperature:g}", shown, readable(text))
        for temperature, found in written
        for text in found
    )


def readable(text: bytes) -> str:
    """As people can read it: what is neither UTF-8 nor printed becomes a mark."""
    letters = text.decode(errors="replace")
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in letters
    )
