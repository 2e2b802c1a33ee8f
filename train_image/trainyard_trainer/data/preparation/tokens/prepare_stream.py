"""Convert text into one stream of tokens, cut into rows: tokenise in chunks, shuffle the rows, write.

A preparation that was killed resumes, and ends with the same bytes as one that was not:

    <dest>/.prepare/plan.json             the source and the options; written first
    <dest>/.prepare/train-00000.tokens    the tokens of some text of the source, and .json, their record
    <dest>/train/part-00000.parquet
    <dest>/dataset.json                   marks the data set as complete; .prepare is removed then
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import fs

from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.destination import (
    clear_state,
    is_finished,
    refuse_nested,
    settle_plan,
    write_file,
)
from trainyard_trainer.data.preparation.tokens.token_chunks import (
    Chunk,
    ChunkContent,
    ChunkWriter,
)
from trainyard_trainer.data.prepared import (
    DATASET,
    FORMAT,
    StreamCounts,
    TokenStreamInfo,
    token_column,
)
from trainyard_trainer.data.sources.parts import ALL, TRAIN, VALID
from trainyard_trainer.data.sources.tokens.byte_rows import Document, TextFiles, find_text
from trainyard_trainer.data.sources.tokens.stream_format import StreamFormat
from trainyard_trainer.data.sources.tokens.text_pieces import TextPiece, pieces_of, whole_lines
from trainyard_trainer.data.sources.tokens.tokenizer_folder import (
    TOKENIZER_KEY,
    TextTokenizer,
    text_tokenizer,
    tokenizer_sha256,
)
from trainyard_trainer.data.stored_rows import write_token_part
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder

FILE_BYTES = 64 * 2**20
"""About the largest size of a Parquet file before compression."""

SPLITS = (TRAIN, VALID)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """The options that determine the bytes of a prepared data set of text as tokens."""

    source: str
    valid_source: str | None
    valid_share: float
    text_files: str | None
    """The pattern of the names of text files in a folder."""
    form: StreamFormat

    def to_json(self) -> dict[str, Any]:
        """Return the options with the hash of the tokenizer, which may change in its place."""
        sha256 = tokenizer_sha256(self.folder, TOKENIZER_KEY)
        options = asdict(self)
        options["form"].pop("folder")  # what was fetched lies elsewhere on another machine
        return {**options, "tokenizer_sha256": sha256}

    @property
    def folder(self) -> str:
        """The folder of the tokenizer on this machine. Raises ConfigError if the run has none."""
        if self.form.folder is None:
            raise ConfigError(
                f"data.source = {self.source} has no files of tokens (.bin), for which "
                "train.model.vocab_size alone is enough.\n       For text set train.model.tokenizer."
            )
        return self.form.folder


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitText:
    """The documents of a split."""

    filesystem: fs.FileSystem
    documents: Sequence[Document]

    @property
    def bytes(self) -> int:
        """The number of bytes of all documents."""
        return sum(document.end - document.begin for document in self.documents)


def prepare_stream(options: StreamOptions, dest: RunFolder, context: PrepareContext) -> None:
    """Write the data set, or what is missing of it.

    Raises ConfigError if the source cannot be read, or has too little text, and if the destination holds
    something else.
    """
    wanted, form = options.to_json(), options.form
    refuse_nested(dest, [options.source, options.valid_source])
    if is_finished(dest, wanted):
        return
    files = {
        name: find_text(
            path, endpoint=context.endpoint, pattern=options.text_files, say=context.say
        )
        for name, path in ((TRAIN, options.source), (VALID, options.valid_source))
        if path is not None
    }
    stamps = {f"files of {name}": found.stamp for name, found in files.items()}
    settle_plan(dest, wanted, stamps, dict, context)
    tokenizer = text_tokenizer(options.folder)
    texts = _divide(files, options.valid_share)
    writer = ChunkWriter(dest, PieceTokenizer(tokenizer), context.processes)
    chunks = {name: _tokenise(writer, name, texts[name], context) for name in SPLITS}
    counts = {name: _count(texts[name], chunks[name]) for name in SPLITS}
    for name in SPLITS:
        if counts[name].tokens <= form.context_length:
            raise ConfigError(
                f"{options.source}: its {name} split has {counts[name].tokens:,} tokens, and a row takes "
                f"{form.context_length + 1:,}. Use more text, or a smaller train.model.context_length."
            )
    with tempfile.TemporaryDirectory() as scratch:
        entries = {
            name: _write_split(
                name, chunks[name], form, tokenizer.vocab_size, dest, Path(scratch), context
            )
            for name in SPLITS
        }
    info = TokenStreamInfo(
        source=options.source,
        row_tokens=form.context_length + 1,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=form.tokenizer,
        tokenizer_sha256=wanted["tokenizer_sha256"],
        train=counts[TRAIN],
        valid=counts[VALID],
    )
    document = {
        "format": FORMAT,
        "options": wanted,
        "stream": asdict(info),
        "splits": {name: {"files": entries[name]} for name in SPLITS},
        "bad_samples": [],
    }
    dest.write(f"{dest.root}/{DATASET}", json.dumps(document, indent=1))
    clear_state(dest)


def _divide(files: dict[str, TextFiles], valid_share: float) -> dict[str, SplitText]:
    """Return the documents of both splits: of a source each, or the begins and ends of the same files."""
    source = files[TRAIN]
    if VALID in files:
        return {
            name: SplitText(filesystem=found.filesystem, documents=found.documents(0)[ALL])
            for name, found in files.items()
        }
    parts = source.documents(valid_share)
    found = whole_lines(source.filesystem, parts[TRAIN], parts[VALID])
    return {
        name: SplitText(filesystem=source.filesystem, documents=documents)
        for name, documents in zip(SPLITS, found, strict=True)
    }


# Tokenising.


class PieceTokenizer:
    """Makes chunks of pieces of text: their tokens, and the token that ends a text behind each document."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, name: str, pieces: list[TextPiece]) -> tuple[Chunk, bytes]:
        """Return the record of a chunk of these pieces, and the content of its file."""
        chunk = Chunk(name=name)
        parts = []
        for piece, tokens in zip(
            pieces, self._tokenizer.encode([piece.text for piece in pieces]), strict=True
        ):
            parts.append(tokens + [self._tokenizer.end_of_text] * piece.is_last)
            chunk.lengths.append(len(parts[-1]))
            chunk.source_rows += piece.is_last
        return chunk, b"".join(np.asarray(part, "<i4").tobytes() for part in parts)


def _tokenise(
    writer: ChunkWriter[TextPiece], name: str, text: SplitText, context: PrepareContext
) -> list[Chunk]:
    done, chunks = 0, []

    def counted(pieces: Iterable[TextPiece]) -> Iterable[TextPiece]:
        nonlocal done
        for piece in pieces:
            done += piece.size
            yield piece

    for chunk in writer.write(name, counted(pieces_of(text.filesystem, text.documents))):
        chunks.append(chunk)
        context.show(f"tokenising {name}, bytes", done, text.bytes)
    return chunks


def _count(text: SplitText, chunks: Sequence[Chunk]) -> StreamCounts:
    return StreamCounts(
        tokens=sum(sum(chunk.lengths) for chunk in chunks),
        documents=len(text.documents),
        bytes=text.bytes,
    )


# Writing.


class Windows:
    """Rows of several arrays of tokens, one behind the other; each begins with the last token of another."""

    def __init__(self, parts: Sequence[np.ndarray], step: int) -> None:
        self._parts = parts
        self._step = step
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return max((int(self._ends[-1]) - 1) // self._step, 0) if len(self._parts) else 0

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of some rows, (N, step + 1) int32."""
        found = np.empty((len(rows), self._step + 1), np.int32)
        for row, number in zip(found, rows.tolist(), strict=True):
            self._fill(row, number * self._step)
        return found

    def _fill(self, row: np.ndarray, start: int) -> None:
        index = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(row):
            part = self._parts[index]
            first = start + filled - (int(self._ends[index]) - len(part))
            piece = part[first : first + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1


def _write_split(
    name: str,
    chunks: Sequence[Chunk],
    form: StreamFormat,
    vocab_size: int,
    dest: RunFolder,
    scratch: Path,
    context: PrepareContext,
) -> list[dict[str, Any]]:
    """Write the files of a split, and return their entries in dataset.json. `scratch` is for copies."""
    windows = Windows(
        [ChunkContent(dest, chunk, scratch).tokens for chunk in chunks], form.context_length
    )
    order = np.random.default_rng([form.seed, SPLITS.index(name)]).permutation(len(windows))
    row_tokens = form.context_length + 1
    column = token_column(row_tokens, vocab_size)
    rows_per_file = max(1, FILE_BYTES // column.stored_bytes)
    header = {"format": FORMAT, "tokenizer": form.tokenizer, "row_tokens": row_tokens}
    entries = []
    for number, start in enumerate(range(0, len(order), rows_per_file)):
        rows = order[start : start + rows_per_file]
        file = f"{name}/part-{number:05}.parquet"
        data = write_token_part(header, file, start, windows[rows], numbers=column.numbers)
        entries.append(write_file(dest, file, data, len(rows)))
        context.show(f"writing {name}", start + len(rows), len(order))
    return entries
