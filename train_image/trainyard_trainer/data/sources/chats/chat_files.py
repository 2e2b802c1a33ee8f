"""Read the rows of chats from files, with the place of each one for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import fs, parquet

from trainyard_trainer.data.sources.lance_datasets import SUFFIX, split_version
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.parts import SampleLocation, stamp_of
from trainyard_trainer.data.sources.rows.split_files import (
    FileFormat,
    SplitFiles,
    SplitName,
    find_files,
    format_of,
    open_lance_table,
)
from trainyard_trainer.data.sources.text_header import require_utf8_text
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

JSON_LINES = FileFormat(name="JSON lines", description="JSON lines", suffixes=(".jsonl", ".ndjson"))
JSON_LIST = FileFormat(name="JSON", description="a JSON list of rows", suffixes=(".json",))
PARQUET = FileFormat(name="Parquet", description="Parquet", suffixes=(".parquet",))
ARROW = FileFormat(name="Arrow", description="Arrow files of `datasets`", suffixes=(".arrow",))
LANCE = FileFormat(name="Lance", description="data sets of Lance", suffixes=(SUFFIX,))

FORMATS = (JSON_LINES, JSON_LIST, PARQUET, ARROW, LANCE)

BATCH_ROWS = 1000
"""The number of rows that are read at once from files that have columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """A row of a source."""

    location: SampleLocation
    row: Any
    """The row as JSON has it; None if it cannot be read."""
    problem: str | None = None
    """Why it cannot be read."""
    size: int = 0
    """About how many bytes it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFiles:
    """The files of a source of chats."""

    found: SplitFiles
    key: str = "data.source"
    """What names the source, for messages."""

    @classmethod
    def open(cls, source: str, endpoint: str | None) -> ChatFiles:
        """Find the files of a source. Raises ConfigError if there are none."""
        return cls(found=find_files(source, endpoint, FORMATS, kind="source of chats"))

    @classmethod
    def open_file(cls, path: str, endpoint: str | None, *, keys: tuple[str, str]) -> ChatFiles:
        """Open one file; `keys` name it and its endpoint. Raises ConfigError if it is no file of rows."""
        if split_version(path)[0].endswith(SUFFIX):
            found = find_files(path, endpoint, (LANCE,), kind="data set of Lance", keys=keys)
            return cls(found=found, key=keys[0])
        filesystem, root = open_filesystem(path, endpoint, names=keys)
        with explained_errors(path, keys[0]):
            info = filesystem.get_file_info(root)
        if info.type != fs.FileType.File:
            problem = "does not exist" if info.type == fs.FileType.NotFound else "is no file"
            raise ConfigError(f"{keys[0]} = {path} {problem}.")
        form = format_of(root, FORMATS)
        if form is None:
            endings = ", ".join(suffix for each in FORMATS for suffix in each.suffixes)
            raise ConfigError(f"{keys[0]} = {path} has to end in one of {endings}")
        split_files = SplitFiles(
            filesystem=filesystem, form=form, splits={}, files=[root], root=root
        )
        return cls(found=split_files, key=keys[0])

    @property
    def is_split(self) -> bool:
        """Whether there are files for training and for validation."""
        return bool(self.found.splits)

    def stamp(self) -> str:
        """Return a fingerprint of the files: of their names, sizes and times, or of their versions."""
        if self.found.versions:
            return stamp_of(sorted(self.found.versions.items()))
        with explained_errors(self.found.shown(self.found.files[0]), self.key):
            infos = self.found.filesystem.get_file_info(self.found.files)
        return stamp_of([(info.path, info.size, info.mtime_ns) for info in infos])

    def rows(self, split: SplitName | None) -> Iterator[SourceRow]:
        """Yield the rows of the files of a split, or of all files. Raises ConfigError."""
        for path in self.found.splits[split] if split else self.found.files:
            shown = self.found.shown(path)
            with explained_errors(shown, self.key, kind=f"{self.found.form.name} file"):
                yield from self._rows_of(path, shown)

    @property
    def is_table(self) -> bool:
        """Whether the files have columns with types: Parquet, Arrow and Lance."""
        return self.found.form in (PARQUET, ARROW, LANCE)

    def table(self) -> pa.Table:
        """Return all rows of files that have columns. Raises ConfigError."""
        batches: list[pa.RecordBatch] = []
        for path in self.found.files:
            with explained_errors(self.found.shown(path), self.key):
                batches += self._batches(path)
        return pa.Table.from_batches(batches)

    def _rows_of(self, path: str, shown: str) -> Iterator[SourceRow]:
        if self.found.form is JSON_LINES:
            with self.found.filesystem.open_input_stream(path) as stream:
                yield from _json_lines(stream, shown)
            return
        for number, (row, size) in enumerate(self._values_of(path, shown), 1):
            yield SourceRow(location=SampleLocation(shown, number, "row"), row=row, size=size)

    def _values_of(self, path: str, shown: str) -> Iterator[tuple[Any, int]]:
        """Yield the values of each row, and about how many bytes they have."""
        if self.found.form is JSON_LIST:
            with self.found.filesystem.open_input_stream(path) as stream:
                content = stream.read()
            rows = _json_list(content, shown)
            yield from ((row, len(content) // len(rows)) for row in rows)
            return
        for batch in self._batches(path):
            size = batch.nbytes // max(len(batch), 1)
            yield from ((row, size) for row in batch.to_pylist())

    def _batches(self, path: str) -> Iterator[pa.RecordBatch]:
        if self.found.form is LANCE:
            yield from open_lance_table(self.found.file(path)).batches(BATCH_ROWS)
            return
        with self.found.filesystem.open_input_file(path) as stream:
            if self.found.form is PARQUET:
                yield from parquet.ParquetFile(stream).iter_batches(BATCH_ROWS)
                return
            try:
                reader = pa.ipc.open_stream(stream)
            except pa.ArrowInvalid:
                stream.seek(0)
                reader = pa.ipc.open_file(stream)
                yield from (reader.get_batch(each) for each in range(reader.num_record_batches))
                return
            yield from reader


def _json_list(content: bytes, shown: str) -> list[Any]:
    """Return the rows of a whole JSON file. Raises ConfigError if it is no list."""
    try:
        found = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{shown} is no JSON: {error}. If each line is a row, name it .jsonl."
        ) from None
    if not isinstance(found, list):
        raise ConfigError(
            f"{shown} is no list of rows, but one value of type {type(found).__name__}"
        )
    return found


def _json_lines(stream: Any, shown: str) -> Iterator[SourceRow]:
    """Yield the rows of a file of JSON lines; a line that is no JSON has a problem in place of a row.

    Raises ConfigError for a file in UTF-16.
    """
    for number, line in enumerate(_lines(stream), 1):
        if number == 1:
            require_utf8_text(shown, line)
        if not line.strip():
            continue
        location = SampleLocation(shown, number, "line")
        try:
            row = json.loads(line, object_pairs_hook=_unique)
            yield SourceRow(location=location, row=row, size=len(line))
        except (ValueError, RecursionError) as error:
            yield SourceRow(location=location, row=None, problem=f"it is no JSON: {error}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a repeated key: Python would keep its last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is there twice")
    return found


def _lines(stream: Any) -> Iterator[bytes]:
    """Yield the lines of a stream of pyarrow, whatever their length."""
    rest = b""
    while chunk := stream.read(2**20):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest
