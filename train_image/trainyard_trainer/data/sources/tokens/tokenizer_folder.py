"""The folder of a tokenizer: its files, their hash, and the tokenizer that Transformers loads from it.

`key` is what names the folder in messages: a key of the run file.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainyard_trainer.errors import ConfigError

MODEL_KEY = "train.model.path"
"""The key of a run file that names the folder of a model with its tokenizer."""

TOKENIZER_KEY = "train.model.tokenizer"
"""The key of a run file that names the folder of a tokenizer alone."""

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

REASON_LETTERS = 240
"""The largest length of what a library says of a file, in messages."""

TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates."""


def tokenizer_files(folder: str, key: str = MODEL_KEY) -> list[Path]:
    """Return the files of a tokenizer. Raises ConfigError if the folder does not exist, or has none."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"{key} = {folder}: there is no such folder. Name a folder that has a tokenizer, such as that of "
            "a model."
        )
    found = [root / name for name in TOKENIZER_FILES if (root / name).is_file()]
    if not found:
        raise ConfigError(
            f"{key} = {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. "
            "Copy the files of the tokenizer into the folder."
        )
    settings = [root / name for name in SETTINGS_FILES if (root / name).is_file()]
    return sorted([*found, *settings, *(root / TEMPLATES).glob("*.jinja")])


def tokenizer_sha256(folder: str, key: str = MODEL_KEY) -> str:
    """Return the SHA-256 of a tokenizer: of its files, and of the type of model that chooses its class."""
    known = hashlib.sha256()
    for path in tokenizer_files(folder, key):
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


def load_tokenizer(folder: str, key: str = MODEL_KEY) -> Any:
    """Load the tokenizer of a folder. Raises ConfigError if the folder has none that works."""
    tokenizer_files(folder, key)
    from transformers import AutoTokenizer

    try:
        # Without trust_remote_code, Transformers would ask on the terminal whether to run code of the folder.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # several libraries read these files, and each fails in its own way
        raise ConfigError(
            f"{key} = {folder}: its tokenizer cannot be loaded: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """Return what a library says of a file that it cannot use, as one line.

    >>> reason_of(ValueError("no\\n  such class"))
    'no such class'
    >>> reason_of(KeyError("added_tokens"))
    "KeyError: 'added_tokens'"
    """
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError, ImportError)):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text or type(error).__name__, REASON_LETTERS, placeholder=" ...")


def padding_of(tokenizer: Any) -> int:
    """Return the token that fills rows: the tokenizer's own, or the one that ends a text, or the first."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in tokens if token is not None)


class TextTokenizer:
    """Makes tokens of plain text, and text of tokens, by the tokenizer of a folder."""

    def __init__(self, folder: str, key: str = TOKENIZER_KEY) -> None:
        """Load the tokenizer. Raises ConfigError if there is none, or if no token of it ends a text."""
        self._tokenizer = load_tokenizer(folder, key)
        # It cuts nothing here, and only causes a warning for longer texts.
        self._tokenizer.model_max_length = 2**62
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{key} = {folder}: its tokenizer has no token that ends a text. Name one as eos_token in "
                "its tokenizer_config.json."
            )
        self.end_of_text: int = self._tokenizer.eos_token_id
        """The token behind each document."""
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        """One more than the highest id of a token."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without tokens that the tokenizer would add around a text.

        Special tokens that are written out in a text, such as <|endoftext|>, are recognised.
        """
        found: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False).input_ids
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


@lru_cache(maxsize=1)
def text_tokenizer(folder: str) -> TextTokenizer:
    """Return the tokenizer of a folder that a run names, which takes a second to load."""
    return TextTokenizer(folder)
