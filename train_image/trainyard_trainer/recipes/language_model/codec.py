"""Text as the tokens of a language model, and back: each byte is a token, or a tokenizer makes them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from trainyard_trainer.config.location import HUB
from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.data.sources.tokens.byte_rows import SEPARATOR
from trainyard_trainer.data.sources.tokens.tokenizer_address import TokenizerAddress
from trainyard_trainer.data.sources.tokens.tokenizer_folder import (
    TOKENIZER_KEY,
    TextTokenizer,
    tokenizer_files,
)
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.run_folder.folder import RunFolder

PROMPT_BYTES, PROMPT_TOKENS = 60, 16
"""The length of a prompt from validation text, at most."""


class Codec(Protocol):
    """Makes tokens of text, and text of tokens."""

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt. Raises ConfigError if it has the token that ends a document."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return tokens as text, in UTF-8 where the model has learnt that."""

    def prompt_of(self, row: Sequence[int], length: int) -> list[int]:
        """Return the begin of the longest stretch of one document in a row, of at most `length` tokens."""


class ByteCodec:
    """Each byte is a token."""

    def encode(self, prompt: str) -> list[int]:
        """Return the bytes of a prompt."""
        found = prompt.encode()
        if SEPARATOR in found:
            raise ConfigError("--prompt has a byte 0, which ends a document. Leave it out.")
        return list(found)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes that the tokens are."""
        return bytes(tokens)

    def prompt_of(self, row: Sequence[int], length: int) -> list[int]:
        """Return the begin of a document in whole characters and words."""
        return list(prompt_of(bytes(row), min(PROMPT_BYTES, length)))


class TokenCodec:
    """A tokenizer makes the tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        (tokens,) = self._tokenizer.encode([prompt])
        if self._tokenizer.end_of_text in tokens:
            raise ConfigError("--prompt has the token that ends a document. Leave it out.")
        return tokens

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of the tokens."""
        return self._tokenizer.decode(tokens).encode()

    def prompt_of(self, row: Sequence[int], length: int) -> list[int]:
        """Return the first tokens of a document."""
        end = self._tokenizer.end_of_text
        documents = [list(run) for is_end, run in groupby(row, end.__eq__) if not is_end]
        return max(documents, key=len, default=[])[: min(PROMPT_TOKENS, length)]


def prompt_of(row: bytes, length: int) -> bytes:
    """The beginning of the longest stretch of one document in a row, in whole characters and words."""
    documents = row.split(bytes([SEPARATOR]))
    document = max(documents, key=len)
    cut = document[:length]
    if len(document) > length:
        cut = cut[: cut.rfind(b" ")] if b" " in cut[1:] else cut
    return cut.decode(errors="ignore").encode()


ADDRESS = "address.json"
"""The file beside those of the tokenizer that has its address, of the hub with the commit."""


def saved_address(folder: RunFolder) -> str | None:
    """Return the address of the tokenizer that a run has saved; None if it has not saved one of the hub."""
    path = f"{folder.tokenizer}/{ADDRESS}"
    return str(json.loads(folder.read(path))["path"]) if folder.exists(path) else None


def save_tokenizer(folder: RunFolder, address: TokenizerAddress) -> None:
    """Copy the files of a tokenizer into the run's folder, where predictions find them."""
    path = address.folder()
    # The type of model in config.json may choose the class of the tokenizer.
    for file in [*tokenizer_files(path, TOKENIZER_KEY), *Path(path).glob("config.json")]:
        target = f"{folder.tokenizer}/{file.name}"
        if file.parent == Path(path) and not folder.exists(target):
            folder.write(target, file.read_bytes())
    if address.path.startswith(HUB):
        folder.write(f"{folder.tokenizer}/{ADDRESS}", json.dumps({"path": address.path}, indent=2))


def codec_of(folder: RunFolder, config: Gpt) -> Codec:
    """Return the codec of a run's model, by the tokenizer in the run's folder.

    Raises RunError if that is missing, and ConfigError for a model of files of tokens without a tokenizer.
    """
    if not config.has_tokens:
        return ByteCodec()
    if config.tokenizer is None:
        raise ConfigError(
            f"{folder.name} has learnt files of tokens without a tokenizer, so it can neither read nor write "
            f"text. Train with {TOKENIZER_KEY}."
        )
    names = folder.file_names(folder.tokenizer)
    if not names:
        raise RunError(
            f"{folder.show(folder.tokenizer)} has no files of the tokenizer. Copy those of "
            f"{config.tokenizer} there."
        )
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            Path(scratch, name).write_bytes(folder.read(f"{folder.tokenizer}/{name}"))
        return TokenCodec(TextTokenizer(scratch, folder.show(folder.tokenizer)))
