"""Files of tokens of text: raw uint16 as nanoGPT writes them, and with the header of llm.c.

A file of llm.c begins with 256 int32: a magic number, a version, and the number of tokens. Files are mapped
into memory where they lie. Numbers are little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pyarrow import fs

from trainyard_trainer.config.data.sources import BUILT_IN
from trainyard_trainer.data.prepared import TokenStreamInfo
from trainyard_trainer.data.sources.listing import (
    SOURCE_KEYS,
    explained_errors,
    find_root,
    list_all,
)
from trainyard_trainer.data.sources.parts import stamp_of
from trainyard_trainer.data.sources.rows.split_files import SPLITS, UNUSED, SplitName
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

SUFFIX = ".bin"

HEADER_BYTES = 256 * 4

CHECKED_TOKENS = 2**24
"""The number of tokens whose ids are checked at once."""

EVALUATION = 20240522
"""The magic number of llm.c's files of questions with several answers."""


class HeaderFormat(NamedTuple):
    """A kind of header of llm.c."""

    version: int
    dtype: Literal["uint16", "uint32"]


HEADERS = {
    20240520: HeaderFormat(version=1, dtype="uint16"),
    20240801: HeaderFormat(version=7, dtype="uint32"),
}
"""The kinds of headers by their magic numbers: for the tokens of GPT-2, and for those of Llama 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """A file of tokens, and the format of its content."""

    path: str
    dtype: Literal["uint16", "uint32"]
    offset: int
    """The size of its header in bytes."""
    tokens: int

    def mapped(self) -> np.ndarray:
        """Return its tokens, mapped into memory."""
        return np.memmap(
            self.path, np.dtype(self.dtype).newbyteorder("<"), "r", self.offset, (self.tokens,)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShards:
    """A data set of files of tokens, which are read where they lie.

    A row is a stretch of a file, and begins with the last token of the row before it. What does not fill the
    last row of a file is left out.
    """

    info: TokenStreamInfo
    train: tuple[TokenFile, ...]
    valid: tuple[TokenFile, ...]
    bad_samples: int = 0

    @property
    def num_train(self) -> int:
        """The number of training rows."""
        return sum(self.rows_of(self.train))

    @property
    def num_valid(self) -> int:
        """The number of validation rows."""
        return sum(self.rows_of(self.valid))

    def rows_of(self, files: Sequence[TokenFile]) -> list[int]:
        """Return the number of rows of each file."""
        return [(file.tokens - 1) // (self.info.row_tokens - 1) for file in files]


def token_paths(source: str, endpoint: str | None) -> list[str]:
    """Return the files of tokens of a source, in the order of their paths; none if it is something else.

    Raises ConfigError if they lie in a bucket, where they cannot be mapped into memory.
    """
    if source in BUILT_IN:
        return []
    filesystem, root = open_filesystem(source, endpoint, names=SOURCE_KEYS)
    info = find_root(source, filesystem, root, endpoint)
    infos = [info] if info.type == fs.FileType.File else list_all(filesystem, root)
    found = [each.path for each in infos if each.path.lower().endswith(SUFFIX)]
    if found and not isinstance(filesystem, fs.LocalFileSystem):
        raise ConfigError(
            f"data.source = {source} has files of tokens in a bucket, where they cannot be mapped into "
            "memory. Copy them to a volume that all workers see."
        )
    return found


def open_token_file(path: str) -> TokenFile:
    """Read the header of a file of tokens. Raises ConfigError if it is no such file, or damaged."""
    with explained_errors(path):
        size = Path(path).stat().st_size
        with Path(path).open("rb") as stream:
            begin = stream.read(HEADER_BYTES)
    if not size:
        raise ConfigError(f"{path} is empty. Write it again, or remove it.")
    header = np.frombuffer(begin[: len(begin) // 4 * 4], "<i4")
    magic = int(header[0]) if len(header) else 0
    if magic == EVALUATION:
        raise ConfigError(
            f"{path} is an evaluation file of llm.c, and no tokens of text. Name other files."
        )
    if magic not in HEADERS:
        if size % 2:
            raise ConfigError(
                f"{path} has an odd number of bytes, {size:,}: without a header of llm.c each token is a "
                "uint16 of 2 bytes. Write it again."
            )
        return TokenFile(path=path, dtype="uint16", offset=0, tokens=size // 2)
    if size < HEADER_BYTES:
        raise ConfigError(
            f"{path} ends within its header of {HEADER_BYTES:,} bytes: it has {size:,}. Write it again."
        )
    known, version, tokens = HEADERS[magic], int(header[1]), int(header[2])
    if version != known.version:
        raise ConfigError(
            f"{path} has a header of llm.c ({magic}) of version {version}, and only {known.version} is "
            "known. Write it again with that version."
        )
    due = HEADER_BYTES + tokens * np.dtype(known.dtype).itemsize
    if tokens <= 0 or size != due:
        raise ConfigError(
            f"{path} is damaged: its header counts {tokens:,} tokens, which with it are {due:,} bytes, and "
            f"it has {size:,}. Write it again."
        )
    return TokenFile(path=path, dtype=known.dtype, offset=HEADER_BYTES, tokens=tokens)


def split_of(path: str, root: str) -> SplitName | None:
    """Return the split that a word in the name of a file, or of a folder below the root, names."""
    below = path.removeprefix(root).strip("/") or Path(path).name
    words = re.split(r"[^a-z0-9]+", below.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def divide(
    source: str, paths: Sequence[str], valid_source: str | None, valid_paths: Sequence[str]
) -> dict[SplitName, list[str]]:
    """Return the files of both splits. Raises ConfigError if one of them has none."""
    found: dict[SplitName | None, list[str]] = {"train": [], "valid": [], None: []}
    for path in paths:
        if UNUSED not in re.split(r"[^a-z0-9]+", Path(path).name.lower()):
            found[split_of(path, source)].append(path)
    train, valid, others = found["train"], found["valid"], found[None]
    if valid_source is not None:
        train, valid, others = train + others, list(valid_paths), []
    if others and train:
        raise ConfigError(
            f"data.source = {source}: {others[0]} belongs to no split, and other files are named train. "
            "Rename it, or move it."
        )
    for name, files, word in (("train", train + others, "train"), ("validation", valid, "val")):
        if not files:
            raise ConfigError(
                f"data.source = {source} has files of tokens, and none of its {name} split. Name one with "
                f"the word {word}, such as {word}{SUFFIX}, or set data.valid_source."
            )
    return {"train": train + others, "valid": valid}


def stamp(files: Sequence[TokenFile]) -> str:
    """Return a fingerprint of files: of their paths, sizes and times."""
    found = [(file.path, Path(file.path).stat()) for file in files]
    return stamp_of([(path, each.st_size, each.st_mtime_ns) for path, each in found])


def check_ids(files: Sequence[TokenFile], vocab_size: int) -> None:
    """Raise ConfigError for the first token that is not in the vocabulary, with its file and position."""
    for file in files:
        if vocab_size > np.iinfo(file.dtype).max:
            continue
        tokens = file.mapped()
        for first in range(0, file.tokens, CHECKED_TOKENS):
            some = tokens[first : first + CHECKED_TOKENS]
            if int(some.max()) >= vocab_size:
                place = int(np.argmax(some >= vocab_size))
                raise ConfigError(
                    f"{file.path}: token {first + place:,} has the id {int(some[place]):,}, and the model "
                    f"knows {vocab_size:,} tokens.\n       Use a larger train.model.vocab_size, or the "
                    "tokenizer that has made the tokens."
                )
