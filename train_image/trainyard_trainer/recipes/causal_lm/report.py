"""What `causal_lm` brings to the report: perplexity, the tokens of the data, and texts of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainyard_trainer.checkpointing.checkpoint import VALIDATION, Checkpoints
from trainyard_trainer.config.training.metric import ANSWERS
from trainyard_trainer.data.prepared import Prepared, TokenInfo
from trainyard_trainer.recipes.causal_lm.texts.prompts import TEXTS
from trainyard_trainer.recipes.causal_lm.texts.questions import GIVEN_ANSWERS
from trainyard_trainer.recipes.causal_lm.token_counts import count_rows
from trainyard_trainer.report.elements import count, table, written
from trainyard_trainer.report.page import RecipeReport, Tile
from trainyard_trainer.run_folder.folder import RunFolder

ANSWER_COLUMNS = ("question", "expected", "written or chosen", "")


def make_report(
    folder: RunFolder,
    data: Prepared,
    info: TokenInfo,
    title: str,
    summary: Mapping[str, Any],
    validation: Mapping[str, Any],
) -> RecipeReport:
    """Make the recipe's part of the report of a run."""
    tokens, mfu = summary["tokens_per_s"], summary.get("mfu")
    seen = summary["samples_seen"] * info.row_tokens
    loss = validation["loss"]
    sections = [("Tokens", table(("", "training", "validation"), count_rows(info)))]
    if answers := validation.get(GIVEN_ANSWERS):
        sections.insert(0, ("Answers to questions", table(ANSWER_COLUMNS, answer_rows(answers))))
    if found := texts_by_epoch(folder):
        sections.insert(0, ("What it writes", written(cards_of(found))))
    result = Tile("validation perplexity", f"{perplexity(loss):.4g}", f"loss {loss:.4f} per token")
    if ANSWERS.name in validation:
        right = validation[ANSWERS.name]
        result = Tile("questions answered correctly", f"{right:.1%}", f"perplexity {result.value}")
    return RecipeReport(
        title=title,
        result=result,
        speed=(
            Tile("tokens per second", f"{tokens:,.0f}", f"{mfu:.1%} MFU" if mfu else ""),
            Tile("tokens seen", f"{seen:,}", f"in {count(summary['steps'], 'step')}, with padding"),
        ),
        sections=tuple(sections),
        facts=(
            ("training rows", f"{data.num_train:,}"),
            ("validation rows", f"{data.num_valid:,}"),
            ("a row", f"{info.row_tokens:,} tokens, {'packed' if info.packing else 'padded'}"),
            ("loss on", info.loss_on),
            ("tokenizer", info.tokenizer),
        ),
    )


def answer_rows(answers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the row of the table for each answer of the delivered checkpoint."""
    for each in answers:
        is_right = "right" if each["is_right"] else "wrong"
        yield each["question"], each["answer"], each["given"], is_right


def perplexity(loss: float) -> float:
    """Return e to the power of the loss per token."""
    return math.exp(loss) if loss < 700 else math.inf


def texts_by_epoch(folder: RunFolder) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """Return the texts of each validation whose checkpoint is kept, the last ones first."""
    checkpoints = Checkpoints(folder)
    found = []
    for checkpoint in checkpoints.committed():
        if VALIDATION in checkpoint.files:
            texts = checkpoints.load(checkpoint.name, VALIDATION).get(TEXTS)
            if texts:
                found.append((checkpoint.trained.epoch, texts))
    return found


def cards_of(
    found: Iterable[tuple[int, Iterable[Mapping[str, Any]]]],
) -> Iterator[tuple[str, str, str]]:
    """Yield the title, the prompt and the text of each card."""
    for epoch, texts in found:
        for each in texts:
            title = f"epoch {epoch}, temperature {each['temperature']:g}"
            yield title, each["prompt"], f"\n{each['text']}"
