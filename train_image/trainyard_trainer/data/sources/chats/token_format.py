"""The format of a prepared data set of tokens: what a run asks for, and what a data set has to fit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainyard_trainer.data.prepared import TokenInfo
from trainyard_trainer.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
"""Files of a tokenizer; a folder with a tokenizer has at least one of them."""

SETTINGS_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that change what a tokenizer does, such as its chat template."""

TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates."""


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


def tokenizer_files(folder: str) -> list[Path]:
    """Return the files of a tokenizer. Raises ConfigError if the folder does not exist, or has none."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"train.model.path = {folder}: there is no such folder. Name the folder of the model, which has "
            "its tokenizer as well."
        )
    found = [root / name for name in TOKENIZER_FILES if (root / name).is_file()]
    if not found:
        raise ConfigError(
            f"train.model.path = {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. "
            "Copy the files of the tokenizer into the folder."
        )
    settings = [root / name for name in SETTINGS_FILES if (root / name).is_file()]
    return sorted([*found, *settings, *(root / TEMPLATES).glob("*.jinja")])


def tokenizer_sha256(folder: str) -> str:
    """Return the SHA-256 of a tokenizer: of its files, and of the type of model that chooses its class."""
    known = hashlib.sha256()
    for path in tokenizer_files(folder):
        data = path.read_bytes()
        known.update(f"{path.relative_to(folder)} {len(data)}\n".encode())
        known.update(data)
    known.update(f"model_type {model_config(folder).get('model_type')}\n".encode())
    return known.hexdigest()


def model_config(folder: str) -> dict[str, object]:
    """Return the content of the model's config.json; empty if the folder has a tokenizer alone."""
    path = Path(folder, "config.json")
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}. Copy the file again.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has no settings of a model. Copy the file again.")
    return found


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
