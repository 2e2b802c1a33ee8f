"""Text as rows of bytes: documents one after the other, cut into rows of one length.

A document is a file, and byte 0 stands behind it, which no text may hold. A row begins with the byte that the
row before ends with: of a row's bytes all but the first are learnt, and so is each byte of the text but the
first, once. What does not fill the last row is left out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.config.data.sources import BUILT_IN
from trainyard_trainer.data.sources.images.samples import ReadImages, Source
from trainyard_trainer.data.sources.listing import (
    SOURCE_KEYS,
    explained_errors,
    find_root,
    list_all,
)
from trainyard_trainer.data.sources.parts import ALL, TRAIN, VALID, SampleLocation, stamp_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

SEPARATOR = 0
"""The byte behind each document."""

PATTERN = "*.txt"

STDLIB_BYTES = 2**20
"""At most so much of Python's own modules."""


@dataclass(frozen=True, slots=True)
class Document:
    """A stretch of a file."""

    file: str
    """In the filesystem's own words."""
    begin: int
    end: int

    @property
    def length(self) -> int:
        """With the separator behind it."""
        return self.end - self.begin + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRows:
    """Rows of documents; they are cheap to read side by side."""

    filesystem: fs.FileSystem
    documents: Sequence[Document]
    row_bytes: int
    starts: Sequence[int]
    """Where each document begins among the bytes of all, and where the last one ends."""
    is_random_access: bool = False
    problems: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, filesystem: fs.FileSystem, documents: Sequence[Document], row_bytes: int
    ) -> TextRows:
        lengths = (document.length for document in documents)
        starts = list(accumulate(lengths, initial=0))
        return cls(filesystem=filesystem, documents=documents, row_bytes=row_bytes, starts=starts)

    @property
    def count(self) -> int:
        return max((self.starts[-1] - 1) // (self.row_bytes - 1), 0)

    @property
    def labels(self) -> pa.Array:
        """Text has none: all are 0."""
        return pa.array(np.zeros(self.count, np.int64))

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        """A row lies as an image of one line."""
        return 1, 1, self.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.count * self.row_bytes

    def where(self, row: int) -> SampleLocation:
        start = row * (self.row_bytes - 1)
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        document = self.documents[index]
        return SampleLocation(document.file, document.begin + start - self.starts[index], "byte")

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        """Raises ConfigError for a file that is no text, or has become shorter."""
        step = self.row_bytes - 1
        first, last = int(rows.min()), int(rows.max())
        data = self._between(first * step, last * step + self.row_bytes, pool)
        windows = np.lib.stride_tricks.sliding_window_view(data, self.row_bytes)[::step]
        return ReadImages(windows[rows - first].reshape(-1, *self.pixel_shape), {})

    def _between(self, start: int, stop: int, pool: Executor) -> np.ndarray:
        """Those bytes of all documents, (N,) uint8."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        pieces = pool.map(self._read, self.documents[first:last])
        joined = b"".join(piece + bytes([SEPARATOR]) for piece in pieces)
        skipped = start - self.starts[first]
        return np.frombuffer(joined, np.uint8)[skipped : skipped + stop - start]

    def _read(self, document: Document) -> bytes:
        with (
            explained_errors(document.file),
            self.filesystem.open_input_file(document.file) as file,
        ):
            data = file.read_at(document.end - document.begin, document.begin)
        if len(data) < document.end - document.begin:
            raise ConfigError(f"{document.file} has become shorter while it was read. Start again.")
        if (found := data.find(SEPARATOR)) >= 0:
            raise ConfigError(
                f"{document.file} is no text: byte {document.begin + found} is 0, which ends a document "
                "here. Remove the file, or leave it out by data.text_files."
            )
        return data


def open_text(
    path: str,
    *,
    endpoint: str | None,
    pattern: str | None,
    row_bytes: int,
    valid_share: float,
    say: Callable[[str], None],
) -> Source:
    """The rows of a text file, or of the files of a folder with such names, in the order of their paths.

    `valid_share` of each file, its end, is the part for validation; with 0 there is none. Raises ConfigError
    if there is no text, or too little for a row.
    """
    files = find_text(path, endpoint=endpoint, pattern=pattern, say=say)
    splits = {}
    for name, documents in files.documents(valid_share).items():
        splits[name] = TextRows.of(files.filesystem, documents, row_bytes)
        if not splits[name].count:
            part = f"{valid_share} of each file, for validation" if name == VALID else "it"
            raise ConfigError(
                f"{path}: {part} has {splits[name].starts[-1]:,} bytes, and a row takes {row_bytes:,}. "
                "Use more text, or a smaller train.model.context_length."
            )
    return Source(path=path, kind="text", splits=splits, stamp=files.stamp)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """The files of a source of text, in the order of their paths."""

    filesystem: fs.FileSystem
    infos: Sequence[fs.FileInfo]

    @property
    def stamp(self) -> str:
        """Return a fingerprint of the files."""
        return stamp_of([(info.path, info.size) for info in self.infos])

    def documents(self, valid_share: float) -> dict[str, list[Document]]:
        """Return the stretches for training, and the end of each file for validation; or all with 0."""
        cuts = [info.size - int(info.size * valid_share) for info in self.infos]
        pairs = list(zip(self.infos, cuts, strict=True))
        found = {
            TRAIN if valid_share else ALL: [Document(each.path, 0, cut) for each, cut in pairs]
        }
        if valid_share:
            found[VALID] = [Document(each.path, cut, each.size) for each, cut in pairs]
        return {
            name: [document for document in documents if document.end > document.begin]
            for name, documents in found.items()
        }


def find_text(
    path: str, *, endpoint: str | None, pattern: str | None, say: Callable[[str], None]
) -> TextFiles:
    """Find a text file, or the files of a folder with such names. Raises ConfigError if there are none."""
    filesystem, infos = (
        _stdlib() if path in BUILT_IN else _find(path, endpoint, pattern or PATTERN, say)
    )
    say(f"{path}: files of text: {len(infos):,}, bytes: {sum(info.size for info in infos):,}")
    return TextFiles(filesystem=filesystem, infos=infos)


def _find(
    path: str, endpoint: str | None, pattern: str, say: Callable[[str], None]
) -> tuple[fs.FileSystem, list[fs.FileInfo]]:
    filesystem, root = open_filesystem(path, endpoint, names=SOURCE_KEYS)
    info = find_root(path, filesystem, root, endpoint)
    if info.type == fs.FileType.File:
        return filesystem, [info]
    files = [info for info in list_all(filesystem, root, say) if info.type == fs.FileType.File]
    infos = [info for info in files if fnmatch(info.base_name, pattern)]
    if not infos:
        raise ConfigError(
            f"{path} has files: {len(files)}, and none is named {pattern}. "
            "Say by data.text_files which are text, such as '*.md'."
        )
    return filesystem, infos


def _stdlib() -> tuple[fs.FileSystem, list[fs.FileInfo]]:
    """Modules of the Python that runs this, in the order of their names, as many as there is room for."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    filesystem = fs.LocalFileSystem()
    infos = filesystem.get_file_info([str(file) for file in files])
    sums: Iterable[int] = accumulate(info.size for info in infos)
    room = list(takewhile(lambda total: total <= STDLIB_BYTES, sums))
    return filesystem, infos[: len(room)]
