"""What `language_model` brings to the report: bits per byte or perplexity, and text that it has written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainyard_trainer.checkpointing.files import load_tensors
from trainyard_trainer.config.train import LanguageModel
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.prepared import Prepared, StreamCounts, TokenStreamInfo
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
    data: Prepared,
    vocabulary: Vocabulary,
    summary: dict[str, Any],
    validation: dict[str, Any],
) -> RecipeReport:
    assert isinstance(config.train, LanguageModel)
    model = config.train.model
    network = Transformer(model, vocabulary).eval()
    network.load_state_dict(load_tensors(folder, folder.model))
    codec, (column,) = codec_of(folder, model), data.info.columns
    row = read_validation(data, [0], column)[0].tolist()
    prompt = codec.prompt_of(row, model.context_length // 2)
    is_bytes = model.tokenizer is None
    written = [
        (
            temperature,
            [
                codec.decode(text)
                for text in continued(
                    network,
                    prompt,
                    count=TEXTS,
                    length=LENGTH_BYTES if is_bytes else LENGTH_TOKENS,
                    context_length=model.context_length,
                    temperature=temperature,
                    seed=config.train.seed,
                    separator=vocabulary.separator,
                )
            ],
        )
        for temperature in TEMPERATURES
    ]
    tokens, mfu = summary["tokens_per_s"], summary.get("mfu")
    seen = summary["samples_seen"] * model.context_length
    unit = "byte" if is_bytes else "token"
    return RecipeReport(
        title=title_of(model),
        result=Tile(
            "validation bits per byte",
            f"{bits_per_byte(validation['loss'], data):.3f}",
            f"next {unit} right: {validation['accuracy']:.2%}",
        ),
        speed=(
            Tile("tokens per second", f"{tokens:,.0f}", f"{mfu:.1%} MFU" if mfu else ""),
            Tile("tokens seen", f"{seen:,}", f"in {elements.count(summary['steps'], 'step')}"),
        ),
        sections=(("What it writes", texts(codec.decode(prompt), written)),),
        facts=(
            ("training rows", f"{data.num_train:,}"),
            ("validation rows", f"{data.num_valid:,}"),
            (
                "a row",
                f"{model.context_length:,} {'bytes, each a token' if is_bytes else 'tokens'}, and the one "
                "before them",
            ),
            ("validation loss", f"{validation['loss']:.4f} nats per {unit}"),
            *(() if is_bytes else tokenizer_facts(data, validation["loss"])),
        ),
    )


def bits_per_byte(loss: float, data: Prepared) -> float:
    """Return a loss in nats per token as bits per byte of the validation text, whatever the tokens are."""
    info = data.info
    tokens_per_byte = (
        info.valid.tokens / info.valid.bytes if isinstance(info, TokenStreamInfo) else 1
    )
    return loss / math.log(2) * tokens_per_byte


def tokenizer_facts(data: Prepared, loss: float) -> list[tuple[str, str]]:
    """Return what the report says of tokens that a tokenizer has made."""
    info = data.info
    assert isinstance(info, TokenStreamInfo)
    return [
        ("validation perplexity", f"{math.exp(min(loss, 700)):.4g} per token"),
        ("vocabulary", f"{info.vocab_size:,} tokens of {info.tokenizer}"),
        ("training text", size_of_text(info.train)),
        ("validation text", size_of_text(info.valid)),
    ]


def size_of_text(counts: StreamCounts) -> str:
    """Return the size of a split in words."""
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
