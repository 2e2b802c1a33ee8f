"""Pieces of text files, each of which can be tokenised alone: they end with a line where there is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pyarrow import fs

from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.tokens.byte_rows import Document
from trainyard_trainer.errors import ConfigError

PIECE_BYTES = 2**18
"""The largest size of a piece. The pieces of a chunk are tokenised in parallel."""

LINE_BYTES = 2**12
"""The largest distance by which the cut before the validation part of a file is moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """A part of a document."""

    text: str
    size: int
    """The number of its bytes in the file."""
    is_last: bool
    """Whether the document ends with it."""


def pieces_of(filesystem: fs.FileSystem, documents: Iterable[Document]) -> Iterator[TextPiece]:
    """Yield the pieces of all documents. Raises ConfigError for a file that is not UTF-8, or is too short."""
    for document in documents:
        begin = document.begin
        while begin < document.end:
            size = min(PIECE_BYTES, document.end - begin)
            is_last = begin + size == document.end
            data = _read(filesystem, document.file, begin, begin + size + (not is_last))
            if not is_last:
                size = cut_of(data)
            yield TextPiece(
                text=_decoded(data[:size], document.file, begin), size=size, is_last=is_last
            )
            begin += size


def whole_lines(
    filesystem: fs.FileSystem, train: Iterable[Document], valid: Iterable[Document]
) -> tuple[list[Document], list[Document]]:
    """Move the cut between the training and the validation part of each file to the begin of a line.

    A line may be too long for that; then it is the begin of a character.
    """
    ends = {document.file: document.end for document in train}
    for document in valid:
        if document.file in ends:
            first = max(document.begin - LINE_BYTES, 0)
            data = _read(filesystem, document.file, first, document.begin + 1)
            ends[document.file] = first + _last_line(data)
    return (
        [replace(document, end=ends[document.file]) for document in train],
        [replace(document, begin=ends.get(document.file, 0)) for document in valid],
    )


def cut_of(data: bytes) -> int:
    """Return the last place at which text can be cut, before the last byte of it or earlier.

    It is the begin of a line that does not begin with white space, which tokenizers join with what is before
    it. Without such a line it is the begin of any line, or of a character.
    """
    end = data.rfind(b"\n", 0, len(data) - 1)
    while end >= 0 and data[end + 1 : end + 2].isspace():
        end = data.rfind(b"\n", 0, end)
    return end + 1 if end >= 0 else _last_line(data)


def _last_line(data: bytes) -> int:
    """Return the begin of the last line, or where there is none that of the last character."""
    if line := data.rfind(b"\n", 0, len(data) - 1) + 1:
        return line
    place = len(data) - 1
    while place > len(data) - 4 and data[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _read(filesystem: fs.FileSystem, file: str, begin: int, end: int) -> bytes:
    with explained_errors(file), filesystem.open_input_file(file) as stream:
        data: bytes = stream.read_at(end - begin, begin)
    if len(data) < end - begin:
        raise ConfigError(f"{file} has become shorter while it was read. Start again.")
    return data


def _decoded(data: bytes, file: str, begin: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: byte {begin + error.start} begins no character. Convert the file, for "
            "example with iconv, or leave it out by data.text_files."
        ) from None
