"""What `language_model` brings to the report: bits per byte, and text that the model has written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainyard_trainer.checkpointing.files import load_tensors
from trainyard_trainer.config.train import LanguageModel
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.data.sources.text import SEPARATOR
from trainyard_trainer.data.stored_rows import read_validation
from trainyard_trainer.recipes.language_model.generation import continued
from trainyard_trainer.recipes.language_model.model import Transformer, title_of
from trainyard_trainer.report import elements
from trainyard_trainer.report.page import RecipeReport, Tile
from trainyard_trainer.run_folder.folder import RunFolder

TEMPERATURES = (0.7, 1.0)
"""Near what is likeliest, and as the model has learnt it."""

TEXTS = 3
"""Of each temperature."""

LENGTH = 240
"""Bytes of a text, at most."""

PROMPT = 60
"""Bytes of validation text in front of it, at most."""


def find(
    folder: RunFolder,
    config: TrainerConfig,
    data: Prepared,
    summary: dict[str, Any],
    validation: dict[str, Any],
) -> RecipeReport:
    assert isinstance(config.train, LanguageModel)
    model = config.train.model
    network = Transformer(model).eval()
    network.load_state_dict(load_tensors(folder, folder.model))
    prompt = prompt_of(
        read_validation(data, [0], "text").tobytes(), min(PROMPT, model.context_length // 2)
    )
    written = [
        (
            temperature,
            continued(
                network,
                prompt,
                count=TEXTS,
                length=LENGTH,
                context_length=model.context_length,
                temperature=temperature,
                seed=config.train.seed,
            ),
        )
        for temperature in TEMPERATURES
    ]
    tokens, mfu = summary["tokens_per_s"], summary.get("mfu")
    seen = summary["samples_seen"] * model.context_length
    next_bytes = f"next byte right: {validation['accuracy']:.2%}"
    return RecipeReport(
        title=title_of(model),
        result=Tile(
            "validation bits per byte", f"{validation['loss'] / math.log(2):.3f}", next_bytes
        ),
        speed=(
            Tile("tokens per second", f"{tokens:,.0f}", f"{mfu:.1%} MFU" if mfu else ""),
            Tile("tokens seen", f"{seen:,}", f"in {elements.count(summary['steps'], 'step')}"),
        ),
        sections=(("What it writes", texts(prompt, written)),),
        facts=(
            ("training rows", f"{data.num_train:,}"),
            ("validation rows", f"{data.num_valid:,}"),
            ("a row", f"{model.context_length:,} bytes, each a token, and the one before them"),
            ("validation loss", f"{validation['loss']:.4f} nats per byte"),
        ),
    )


def prompt_of(row: bytes, length: int) -> bytes:
    """The beginning of the longest stretch of one document in a row, in whole characters and words."""
    documents = row.split(bytes([SEPARATOR]))
    document = max(documents, key=len)
    cut = document[:length]
    if len(document) > length:
        cut = cut[: cut.rfind(b" ")] if b" " in cut[1:] else cut
    return cut.decode(errors="ignore").encode()


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
