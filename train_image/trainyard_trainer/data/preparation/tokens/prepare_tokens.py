"""Convert chats, prompts or text into rows of tokens: tokenise in chunks, pack, shuffle, write.

A preparation that was killed resumes, and ends with the same bytes as one that was not:

    <dest>/.prepare/plan.json             the source and the options; written first
    <dest>/.prepare/source-00000.tokens   the samples of some rows of the source, and .json, their record
    <dest>/train/part-00000.parquet
    <dest>/dataset.json                   marks the data set as complete; .prepare is removed then
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainyard_trainer.data.preparation.bad_samples import require_few
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
    RowTokenizer,
)
from trainyard_trainer.data.prepared import (
    DATASET,
    FORMAT,
    LEARNT,
    PADDING,
    STARTS_DOCUMENT,
    TokenCounts,
    TokenInfo,
    token_column,
)
from trainyard_trainer.data.sources.chats.chat_files import ChatFiles, SourceRow
from trainyard_trainer.data.sources.chats.packing import one_row_each, pack, padded_length
from trainyard_trainer.data.sources.chats.token_format import TokenFormat
from trainyard_trainer.data.sources.chats.tokenizer import ChatTokenizer
from trainyard_trainer.data.sources.rows.split_files import SplitName
from trainyard_trainer.data.sources.tokens.tokenizer_folder import tokenizer_sha256
from trainyard_trainer.data.stored_rows import write_token_part
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder

FILE_BYTES = 64 * 2**20
"""About the largest size of a Parquet file before compression."""

SPLITS: tuple[SplitName, ...] = ("train", "valid")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOptions:
    """The options that determine the bytes of a prepared data set of tokens."""

    source: str
    valid_source: str | None
    valid_share: float
    form: TokenFormat

    def to_json(self) -> dict[str, Any]:
        """Return the options with the hash of the tokenizer, which may change in its place."""
        options = asdict(self)
        options["form"].pop("folder")  # what was fetched lies elsewhere on another machine
        return {**options, "tokenizer_sha256": tokenizer_sha256(self.form.folder)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSamples:
    """The samples of a split, in the order of the source."""

    chunks: Sequence[Chunk]
    chunk_of: np.ndarray
    """(N,) int64: the chunk of each sample."""
    offsets: np.ndarray
    """(N,) int64: the first token of each sample among those of its chunk."""
    lengths: np.ndarray
    """(N,) int64: its number of tokens."""
    counts: TokenCounts


def prepare_tokens(options: TokenOptions, dest: RunFolder, context: PrepareContext) -> None:
    """Write the data set, or what is missing of it.

    Raises ConfigError if the source cannot be read, if it has more bad rows than allowed, and if the
    destination holds something else.
    """
    wanted = options.to_json()
    refuse_nested(dest, [options.source, options.valid_source])
    if is_finished(dest, wanted):
        return
    sources = {"source": ChatFiles.open(options.source, context.endpoint)}
    if options.valid_source is not None:
        sources["valid-source"] = ChatFiles.open(options.valid_source, context.endpoint)
    tokenizer = ChatTokenizer(options.form.folder, options.form.loss_on)
    stamps = {f"files of {name}": files.stamp() for name, files in sources.items()}
    settle_plan(dest, wanted, stamps, dict, context)
    writer = ChunkWriter(dest, RowTokenizer(options.form, tokenizer), context.processes)
    chunks = _tokenise(options, sources, writer, context)
    splits = _divide(options, chunks)
    row_tokens = options.form.context_length
    if not options.form.packing:
        longest = max(int(split.lengths.max()) for split in splits.values())
        row_tokens = padded_length(longest, row_tokens)
    numbers = token_column(row_tokens, tokenizer.vocab_size).numbers
    rows = TokenRows(row_tokens, tokenizer.pad_id, numbers, options.form)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as scratch:
        files = {
            name: _write_split(name, splits[name], rows, dest, Path(scratch), context, digest)
            for name in SPLITS
        }
    stored = {name: row_tokens * sum(each["rows"] for each in files[name]) for name in SPLITS}
    info = TokenInfo(
        source=options.source,
        row_tokens=row_tokens,
        context_length=options.form.context_length,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        tokenizer=options.form.tokenizer,
        tokenizer_sha256=wanted["tokenizer_sha256"],
        loss_on=options.form.loss_on,
        packing=options.form.packing,
        too_long=options.form.too_long,
        prompt_as="chat"
        if any(each.chats for part in chunks.values() for each in part)
        else "text",
        rows_sha256=digest.hexdigest(),
        train=_with_padding(splits["train"].counts, stored["train"]),
        valid=_with_padding(splits["valid"].counts, stored["valid"]),
    )
    document = {
        "format": FORMAT,
        "options": wanted,
        "tokens": asdict(info),
        "splits": {name: {"files": files[name]} for name in SPLITS},
        "bad_samples": _bad_rows(chunks),
    }
    dest.write(f"{dest.root}/{DATASET}", json.dumps(document, indent=1))
    clear_state(dest)


# Tokenising.


def _tokenise(
    options: TokenOptions,
    sources: dict[str, ChatFiles],
    writer: ChunkWriter[SourceRow],
    context: PrepareContext,
) -> dict[str, list[Chunk]]:
    """Return the chunks by the part of the data: `train` and `valid`, or `all` if they are not divided.

    Raises ConfigError as soon as more rows than allowed cannot be used.
    """
    source = sources["source"]
    rows = {"all": source.rows(None)}
    if "valid-source" in sources:
        valid = sources["valid-source"]
        rows = {
            "train": source.rows("train" if source.is_split else None),
            "valid": valid.rows("valid" if valid.is_split else None),
        }
    elif source.is_split:
        rows = {name: source.rows(name) for name in SPLITS}
    chunks: dict[str, list[Chunk]] = {}
    for name, part in rows.items():
        chunks[name] = []
        done = 0
        for chunk in writer.write(name, part):
            chunks[name].append(chunk)
            require_few(options.source, _bad_rows(chunks), context.max_bad_samples, what="rows")
            done += chunk.source_rows + len(chunk.bad)
            context.show(f"tokenising {name}", done, done)
    return chunks


def _bad_rows(chunks: dict[str, list[Chunk]]) -> list[dict[str, Any]]:
    """Return the records of the rows that cannot be used."""
    return [each for parts in chunks.values() for chunk in parts for each in chunk.bad]


# Splits.


def _divide(options: TokenOptions, chunks: dict[str, list[Chunk]]) -> dict[SplitName, SplitSamples]:
    """Return the samples of both splits. Raises ConfigError if one of them has none."""
    if "all" in chunks:
        rows = sum(chunk.source_rows for chunk in chunks["all"])
        held = min(max(1, round(options.valid_share * rows)), max(rows - 1, 0))
        order = np.random.default_rng([options.form.seed]).permutation(rows)
        is_valid = np.zeros(rows, bool)
        is_valid[order[:held]] = True
        splits = {
            "train": _samples_of(chunks["all"], ~is_valid),
            "valid": _samples_of(chunks["all"], is_valid),
        }
    else:
        splits = {name: _samples_of(chunks[name], None) for name in SPLITS}
    for name, split in splits.items():
        if not len(split.lengths):
            counts = split.counts
            raise ConfigError(
                f"{options.source}: its {name} split has no sample: {counts.source_rows} rows could be used, "
                f"and {counts.left_out} of their samples have no token to learn.\n"
                f"       {_remedy(options.form, counts)}"
            )
    return {name: splits[name] for name in SPLITS}


def _remedy(form: TokenFormat, counts: TokenCounts) -> str:
    """Return what to do about a split without a sample."""
    if not counts.left_out:
        return "Use more data."
    if form.loss_on == "all":
        return "Check that the rows are not empty, and that the chat template prints them."
    return (
        "With train.loss_on: answers, only turns of the role assistant and completions are learnt. Check the "
        "roles, and where the chat template has {% generation %}; or use train.loss_on: all."
    )


def _samples_of(chunks: Sequence[Chunk], chosen: np.ndarray | None) -> SplitSamples:
    """Return the samples of the chosen source rows, or of all."""
    owners, offsets, lengths, learnt, picked_rows = [], [], [], [], 0
    truncated = truncated_tokens = split = left_out = first = 0
    for number, chunk in enumerate(chunks):
        here: np.ndarray = np.ones(chunk.source_rows, bool)
        if chosen is not None:
            here = chosen[first : first + chunk.source_rows]
        first += chunk.source_rows
        picked_rows += int(here.sum())
        sizes = np.asarray(chunk.lengths, np.int64)
        starts = np.cumsum(sizes) - sizes
        mask = here[np.asarray(chunk.rows, np.int64)]
        owners.append(np.full(int(mask.sum()), number))
        offsets.append(starts[mask])
        lengths.append(sizes[mask])
        learnt.append(np.asarray(chunk.learnt, np.int64)[mask])
        truncated += sum(1 for row, _ in chunk.truncated if here[row])
        truncated_tokens += sum(cut for row, cut in chunk.truncated if here[row])
        split += sum(1 for row in chunk.split if here[row])
        left_out += sum(1 for row in chunk.left_out if here[row])
    all_lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
    powers = np.floor(np.log2(all_lengths)).astype(int)
    return SplitSamples(
        chunks=chunks,
        chunk_of=np.concatenate(owners) if owners else np.empty(0, np.int64),
        offsets=np.concatenate(offsets) if offsets else np.empty(0, np.int64),
        lengths=all_lengths,
        counts=TokenCounts(
            source_rows=picked_rows,
            samples=len(all_lengths),
            tokens=int(all_lengths.sum()),
            learnt_tokens=int(sum(each.sum() for each in learnt)),
            padding_tokens=0,
            truncated_rows=truncated,
            truncated_tokens=truncated_tokens,
            split_rows=split,
            left_out=left_out,
            longest_sample=int(all_lengths.max()) if len(all_lengths) else 0,
            lengths=tuple(np.bincount(powers).tolist()),
        ),
    )


def _with_padding(counts: TokenCounts, stored_tokens: int) -> TokenCounts:
    return TokenCounts(**asdict(counts) | {"padding_tokens": stored_tokens - counts.tokens})


# Writing.


class TokenRows(NamedTuple):
    """How the samples of both splits become rows."""

    row_tokens: int
    pad_id: int
    numbers: np.dtype[Any]
    """The type as which tokens are stored."""
    form: TokenFormat

    def row_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the row of each sample, (N,) int64."""
        return pack(lengths, self.row_tokens) if self.form.packing else one_row_each(lengths)

    def empty(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int32, and flags, uint8, of so many rows of padding."""
        shape = (count, self.row_tokens)
        return np.full(shape, self.pad_id, np.int32), np.full(shape, PADDING, np.uint8)


def _write_split(
    name: SplitName,
    split: SplitSamples,
    form: TokenRows,
    dest: RunFolder,
    scratch: Path,
    context: PrepareContext,
    digest: hashlib._Hash,
) -> list[dict[str, Any]]:
    """Write the files of a split, and return their entries in dataset.json.

    `scratch` is for copies. The tokens and flags of all rows are added to `digest`.
    """
    row_tokens, row_of = form.row_tokens, form.row_of(split.lengths)
    num_rows = int(row_of.max()) + 1
    # The samples of each row: those of row r are by_row[firsts[r] : firsts[r + 1]].
    by_row = np.argsort(row_of, kind="stable")
    firsts = np.searchsorted(row_of[by_row], np.arange(num_rows + 1))
    order = np.random.default_rng([form.form.seed, SPLITS.index(name)]).permutation(num_rows)
    contents = [ChunkContent(dest, chunk, scratch) for chunk in split.chunks]
    rows_per_file = max(1, FILE_BYTES // (row_tokens * (form.numbers.itemsize + 1)))
    header = {"format": FORMAT, "tokenizer": form.form.tokenizer, "row_tokens": row_tokens}
    entries = []
    for number, start in enumerate(range(0, num_rows, rows_per_file)):
        rows = order[start : start + rows_per_file]
        tokens, flags = form.empty(len(rows))
        for place, row in enumerate(rows.tolist()):
            end = 0
            for sample in by_row[firsts[row] : firsts[row + 1]].tolist():
                content = contents[int(split.chunk_of[sample])]
                first, length = int(split.offsets[sample]), int(split.lengths[sample])
                tokens[place, end : end + length] = content.tokens[first : first + length]
                flags[place, end : end + length] = content.learnt[first : first + length] * LEARNT
                flags[place, end] = STARTS_DOCUMENT
                end += length
            if end < row_tokens:
                flags[place, end] |= STARTS_DOCUMENT
        digest.update(tokens.tobytes())
        digest.update(flags.tobytes())
        file = f"{name}/part-{number:05}.parquet"
        data = write_token_part(header, file, start, tokens, flags, numbers=form.numbers)
        entries.append(write_file(dest, file, data, len(rows)))
        context.show(f"writing {name}", start + len(rows), num_rows)
    return entries
