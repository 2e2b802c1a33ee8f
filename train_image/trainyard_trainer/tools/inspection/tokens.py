"""Show a prepared data set of tokens: counts of rows, and samples with the learnt tokens marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trainyard_trainer.data.prepared import (
    LEARNT,
    PADDING,
    STARTS_DOCUMENT,
    Prepared,
    TokenInfo,
    TokenStreamInfo,
)
from trainyard_trainer.data.sources.tokens.tokenizer_folder import load_tokenizer
from trainyard_trainer.data.stored_rows import read_validation
from trainyard_trainer.recipes.causal_lm.token_counts import count_rows
from trainyard_trainer.terminal import table_text

SAMPLES = 3
"""The number of samples of the validation split that are shown."""

SHOWN_TOKENS = 200
"""The largest number of tokens of a sample that are shown."""

GREEN, PLAIN = "\033[32m", "\033[0m"


def tokens_as_json(prepared: Prepared, info: TokenInfo | TokenStreamInfo) -> dict[str, Any]:
    """Return the description of the data set, as `--json` prints it."""
    return {
        "path": prepared.path,
        "kind": "prepared tokens",
        "samples": {"train": prepared.num_train, "valid": prepared.num_valid},
        "bad_samples": prepared.bad_samples,
        **asdict(info),
    }


def tokens_as_text(prepared: Prepared, info: TokenInfo, *, has_colour: bool) -> str:
    """Return the description for the terminal. Without colour, brackets are around what is learnt.

    Samples are shown as text if the folder of the tokenizer is reachable, else as numbers.
    """
    head = (
        f"{prepared.path}: rows of {info.row_tokens:,} tokens, {'packed' if info.packing else 'padded'}, "
        f"from {info.source}\ntokenizer: {info.tokenizer}, loss on: {info.loss_on}, too long: {info.too_long}"
    )
    counts = table_text(("", "training", "validation"), count_rows(info))
    lengths = table_text(("tokens of a sample", "training", "validation"), length_rows(info))
    marks = "in green" if has_colour else "in [brackets]"
    samples = "\n\n".join(sample_texts(prepared, info, has_colour=has_colour))
    return f"{head}\n\n{counts}\n\n{lengths}\n\nvalidation samples, learnt tokens {marks}:\n\n{samples}"


def stream_as_text(prepared: Prepared, info: TokenStreamInfo) -> str:
    """Return the description of a stream of tokens for the terminal, with rows as text."""
    head = (
        f"{prepared.path}: rows of {info.row_tokens:,} tokens, from {info.source}\n"
        f"tokenizer: {info.tokenizer}, {info.vocab_size:,} tokens, {info.end_of_text} ends a document"
    )
    rows = {"rows": (prepared.num_train, prepared.num_valid)} | {
        key: (getattr(info.train, key), getattr(info.valid, key))
        for key in ("documents", "tokens", "bytes")
    }
    counts = table_text(
        ("", "training", "validation"),
        [(key, *(f"{count:,}" for count in pair)) for key, pair in rows.items()],
    )
    shown = read_validation(prepared, list(range(min(SAMPLES, prepared.num_valid))), "tokens")
    decode = _decoder(info)
    samples = "\n\n".join(decode(row[:SHOWN_TOKENS].tolist()) for row in shown)
    return f"{head}\n\n{counts}\n\nvalidation samples:\n\n{samples}"


def length_rows(info: TokenInfo) -> list[tuple[str, str, str]]:
    """Return a row for each power of two with the number of samples of such lengths."""
    powers = max(len(info.train.lengths), len(info.valid.lengths))
    train, valid = (
        [*each.lengths, *[0] * (powers - len(each.lengths))] for each in (info.train, info.valid)
    )
    return [
        (f"{2**power:,} to {2 ** (power + 1) - 1:,}", f"{train[power]:,}", f"{valid[power]:,}")
        for power in range(powers)
        if train[power] or valid[power]
    ]


def sample_texts(prepared: Prepared, info: TokenInfo, *, has_colour: bool) -> Iterator[str]:
    """Yield the first rows of the validation split, each document from a line of its own."""
    rows = list(range(min(SAMPLES, prepared.num_valid)))
    decode = _decoder(info)
    begin, end = (GREEN, PLAIN) if has_colour else ("[", "]")
    all_tokens = read_validation(prepared, rows, "tokens")
    all_flags = read_validation(prepared, rows, "flags")
    for tokens, flags in zip(all_tokens, all_flags, strict=True):
        kept = (flags & PADDING) == 0
        tokens, flags = tokens[kept][:SHOWN_TOKENS], flags[kept][:SHOWN_TOKENS]
        starts = np.flatnonzero(flags & STARTS_DOCUMENT).tolist()
        documents = []
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            marked = zip((flags[start:stop] & LEARNT) > 0, tokens[start:stop].tolist(), strict=True)
            parts = [
                (is_learnt, decode([token for _, token in run]))
                for is_learnt, run in groupby(marked, key=lambda pair: bool(pair[0]))
            ]
            documents.append(
                "".join(f"{begin}{text}{end}" if is_learnt else text for is_learnt, text in parts)
            )
        more = (
            f"\n... {int(kept.sum()) - SHOWN_TOKENS:,} more tokens"
            if kept.sum() > SHOWN_TOKENS
            else ""
        )
        yield "\n".join(documents) + more


def _decoder(info: TokenInfo | TokenStreamInfo) -> Any:
    """Return a function that turns tokens into text."""
    if info.tokenizer is None or not Path(info.tokenizer).is_dir():
        return lambda tokens: f"{' '.join(map(str, tokens))} "
    return load_tokenizer(info.tokenizer).decode
