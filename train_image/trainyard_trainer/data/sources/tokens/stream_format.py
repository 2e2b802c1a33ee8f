"""The format of text as a stream of tokens: what a run asks for, and what a data set has to fit."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard_trainer.data.prepared import TokenStreamInfo
from trainyard_trainer.data.sources.tokens.tokenizer_folder import TOKENIZER_KEY, tokenizer_sha256
from trainyard_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFormat:
    """What a run asks of a stream of tokens."""

    tokenizer: str | None
    """The folder or the address of the tokenizer; None for files of tokens alone."""
    folder: str | None
    """The folder of the tokenizer on this machine."""
    context_length: int
    """The number of tokens of a row that are learnt."""
    vocab_size: int | None = None
    """The number of tokens that the model knows, where there is no tokenizer."""
    end_of_text: int | None = None
    """The token between documents, where there is no tokenizer."""
    seed: int = 0
    """The seed of the order of the rows."""


def require_stream(info: TokenStreamInfo, form: StreamFormat) -> None:
    """Raise ConfigError if a data set has rows of another length, or tokens of another tokenizer."""
    found = info.row_tokens - 1
    if found != form.context_length:
        raise ConfigError(
            f"train.model.context_length = {form.context_length}, but {info.source} is prepared for {found}: "
            f"use {found}, or name the source itself (data.source) to prepare it again."
        )
    if info.tokenizer_sha256 is None:
        return
    if form.folder is None:
        raise ConfigError(
            f"{info.source} was tokenised by {info.tokenizer}: set {TOKENIZER_KEY} to it, in place of "
            "train.model.vocab_size alone."
        )
    sha256 = tokenizer_sha256(form.folder, TOKENIZER_KEY)
    if info.tokenizer_sha256 != sha256:
        raise ConfigError(
            f"{TOKENIZER_KEY} = {form.tokenizer} (SHA-256 {sha256[:12]}) is not the tokenizer of the tokens "
            f"of {info.source}: {info.tokenizer} (SHA-256 {info.tokenizer_sha256[:12]}).\n"
            "       Use that one, or name the source itself (data.source) to prepare it again."
        )
