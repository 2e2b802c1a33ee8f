"""Tokenise a source in chunks, each of which is finished once: its samples lie in a file, with a record."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from trainyard_trainer.data.preparation.bad_samples import bad_record
from trainyard_trainer.data.preparation.destination import state_path
from trainyard_trainer.data.preparation.tokens.chunk_processes import ChunkProcesses
from trainyard_trainer.data.sources.chats.chat_files import SourceRow
from trainyard_trainer.data.sources.chats.examples import WrongRow, example_of, is_chat
from trainyard_trainer.data.sources.chats.token_format import TokenFormat
from trainyard_trainer.data.sources.chats.tokenizer import ChatTokenizer, Tokens
from trainyard_trainer.run_folder.folder import RunFolder

CHUNK_ROWS = 2000
"""The largest number of source rows of a chunk."""

CHUNK_BYTES = 4 * 2**20
"""The size of the source rows after which a chunk ends. Their tokens need about ten times as much memory."""

TOKEN_BYTES = 4
"""The size of a token in a chunk's file. Of chats, a byte for each token follows: whether it is learnt."""


class PartOfSource(Protocol):
    """What chunks are made of: a row of a source, or a piece of a text."""

    @property
    def size(self) -> int:
        """About how many bytes it has."""


Part = TypeVar("Part", bound=PartOfSource)


@dataclass(kw_only=True, slots=True)
class Chunk:
    """The record of a finished chunk."""

    name: str
    source_rows: int = 0
    """The rows of the source that could be used."""
    sha256: str = ""
    chats: int = 0
    """The rows among them that the chat template has rendered."""
    lengths: list[int] = field(default_factory=list)
    """The number of tokens of each sample."""
    learnt: list[int] = field(default_factory=list)
    """The number of tokens of each sample that are learnt."""
    rows: list[int] = field(default_factory=list)
    """The row of each sample, counted among the usable rows of the chunk."""
    truncated: list[list[int]] = field(default_factory=list)
    """The rows whose end was left out, each with the number of tokens that were."""
    split: list[int] = field(default_factory=list)
    """The rows that became several samples."""
    left_out: list[int] = field(default_factory=list)
    """The rows of the samples that were left out because no token of them is learnt."""
    bad: list[dict[str, Any]] = field(default_factory=list)
    """The rows that cannot be used, each with its place and the reason."""


class ChunkWriter(Generic[Part]):
    """Writes the missing chunks of a source into the state of a preparation.

    `tokenise` makes the record of a chunk without its hash, and the content of its file, of its name and of
    parts of the source. It must be picklable.
    """

    def __init__(
        self,
        dest: RunFolder,
        tokenise: Callable[[str, list[Part]], tuple[Chunk, bytes]],
        processes: int | None = 1,
    ) -> None:
        """`processes` is the largest number of processes in which chunks of a large source are made.

        None stands for one per CPU, up to `MOST_PROCESSES`.
        """
        self._dest = dest
        self._tokenise = tokenise
        self._processes = processes

    def write(self, name: str, parts: Iterable[Part]) -> Iterator[Chunk]:
        """Yield the records of all chunks of a source, in its order.

        Chunks of an earlier attempt are not made again, except those with bad rows: these may have been
        repaired.
        """
        making: deque[Future[tuple[Chunk, bytes]]] = deque()
        processes = ChunkProcesses(self._tokenise, self._processes)
        try:
            for number, group in enumerate(_groups_of(parts)):
                chunk_name = f"{name}-{number:05}"
                if (found := self._finished(chunk_name)) is not None:
                    yield from map(self._finish, drained(making, 0))
                    yield found
                    continue
                making.append(processes.submit(chunk_name, group))
                yield from map(self._finish, drained(making, processes.ahead))
            yield from map(self._finish, drained(making, 0))
        finally:
            processes.end()

    def _finished(self, name: str) -> Chunk | None:
        """Return the record of a chunk of an earlier attempt; None if it must be made."""
        record, file = state_path(self._dest, f"{name}.json"), chunk_path(self._dest, name)
        if not self._dest.exists(record):
            return None
        found = Chunk(**json.loads(self._dest.read(record)))
        is_whole = self._dest.exists(file) and self._dest.sha256(file) == found.sha256
        return found if is_whole and not found.bad else None

    def _finish(self, made: Future[tuple[Chunk, bytes]]) -> Chunk:
        """Write a chunk, once it is made, and return its record."""
        chunk, content = made.result()
        chunk.sha256 = hashlib.sha256(content).hexdigest()
        self._dest.write(chunk_path(self._dest, chunk.name), content)
        self._dest.write(state_path(self._dest, f"{chunk.name}.json"), json.dumps(asdict(chunk)))
        return chunk


def drained(making: deque[Future[Any]], left: int) -> Iterator[Future[Any]]:
    """Take the oldest from a queue, until no more than `left` are in it."""
    while len(making) > left:
        yield making.popleft()


class RowTokenizer:
    """Makes chunks of the rows of chats, prompts and texts."""

    def __init__(self, form: TokenFormat, tokenizer: ChatTokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer

    def __call__(self, name: str, rows: list[SourceRow]) -> tuple[Chunk, bytes]:
        """Return the record of a chunk of these rows, and the content of its file."""
        chunk = Chunk(name=name)
        samples: list[Tokens] = []
        for row in rows:
            try:
                if row.problem is not None:
                    raise WrongRow(row.problem)
                samples += self._samples_of(row.row, chunk)
            except WrongRow as reason:
                chunk.bad.append(bad_record(row.location, str(reason)))
        ids = [np.asarray(each.ids, "<i4") for each in samples]
        learnt = [np.asarray(each.is_learnt, np.uint8) for each in samples]
        content = b"".join(each.tobytes() for each in (*ids, *learnt))
        return chunk, content

    def _samples_of(self, row: object, chunk: Chunk) -> list[Tokens]:
        """Return the samples of a row, and add what became of it to the record. Raises WrongRow."""
        example = example_of(row)
        tokens = self._tokenizer.tokens_of(example)
        length, most = len(tokens.ids), self._form.context_length
        if length > most and self._form.too_long == "refuse":
            raise WrongRow(f"it has {length:,} tokens, and train.context_length is {most:,}")
        number = chunk.source_rows
        chunk.source_rows += 1
        chunk.chats += is_chat(example)
        parts = [tokens]
        if length > most:
            cuts = range(0, length, most) if self._form.too_long == "split" else range(1)
            parts = [Tokens(*(each[cut : cut + most] for each in tokens)) for cut in cuts]
            if self._form.too_long == "split":
                chunk.split.append(number)
            else:
                chunk.truncated.append([number, length - most])
        kept = []
        for part in parts:
            # The first token of a document has nothing before it from which it could be predicted.
            learnt = sum(part.is_learnt[1:])
            if not learnt:
                chunk.left_out.append(number)
                continue
            kept.append(part)
            chunk.lengths.append(len(part.ids))
            chunk.learnt.append(learnt)
            chunk.rows.append(number)
        return kept


def _groups_of(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield the parts of one chunk after the other."""
    group: list[Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += part.size
        if len(group) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class ChunkContent:
    """The tokens of a chunk, mapped into memory from its file or from a copy of it on this disk."""

    def __init__(self, dest: RunFolder, chunk: Chunk, scratch: Path) -> None:
        self._count = sum(chunk.lengths)
        self._path = Path(chunk_path(dest, chunk.name))
        if not dest.is_local:
            self._path = scratch / f"{chunk.name}.tokens"
            if not self._path.exists():
                self._path.write_bytes(dest.read(chunk_path(dest, chunk.name)))
        self.tokens: np.ndarray = np.empty(0, np.int32)
        if self._count:
            self.tokens = np.memmap(self._path, "<i4", "r", shape=(self._count,))

    @cached_property
    def learnt(self) -> np.ndarray:
        """Return whether each token is learnt; only the files of rows of chats have it."""
        if not self._count:
            return np.empty(0, np.uint8)
        offset = self._count * TOKEN_BYTES
        return np.memmap(self._path, np.uint8, "r", offset=offset, shape=(self._count,))


def chunk_path(dest: RunFolder, name: str) -> str:
    """Return the path of the file with the tokens of a chunk."""
    return state_path(dest, f"{name}.tokens")
