"""The format of a prepared data set of tokens: what a run asks for, and what a data set has to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard_trainer.data.prepared import TokenInfo
from trainyard_trainer.data.sources.tokens.tokenizer_folder import tokenizer_sha256
from trainyard_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFormat:
    """What a run asks of its tokens: the tokenizer, the length of rows, and the tokens that are learnt."""

    tokenizer: str
    """The folder of the tokenizer, or the address from which it was fetched."""
    folder: str
    """The folder of the tokenizer on this machine."""
    context_length: int
    """The largest number of tokens of a sample, and with packing the number of tokens of each row."""
    packing: bool
    """Whether a row holds several samples; otherwise it is one sample, with padding behind it."""
    loss_on: Literal["answers", "all"]
    """The tokens that are learnt of chats and prompts. Of plain text all tokens are learnt."""
    too_long: Literal["truncate", "split", "refuse"]
    """What becomes of a source row with more tokens than the context length."""
    seed: int = 0
    """The seed of the order, and of the choice of the rows for validation."""


def require_fit(info: TokenInfo, form: TokenFormat) -> None:
    """Raise ConfigError if a prepared data set differs from what the run asks for, with the values."""
    wanted: dict[str, tuple[object, object]] = {
        "train.context_length": (info.context_length, form.context_length),
        "train.packing": (info.packing, form.packing),
        "train.loss_on": (info.loss_on, form.loss_on),
        "train.too_long": (info.too_long, form.too_long),
    }
    lines = [
        f"\n       {key}: {found} in the data, {asked} in the run"
        for key, (found, asked) in wanted.items()
        if found != asked
    ]
    sha256 = tokenizer_sha256(form.folder)
    if info.tokenizer_sha256 != sha256:
        lines.append(
            f"\n       tokenizer: {info.tokenizer} (SHA-256 {info.tokenizer_sha256[:12]}) in the data, "
            f"{form.tokenizer} (SHA-256 {sha256[:12]}) in the run"
        )
    if lines:
        raise ConfigError(
            f"the tokens of {info.source} were prepared for another run:{''.join(lines)}\n"
            "       Use the settings of the data, or name the source itself (data.source) to prepare it "
            "again."
        )
