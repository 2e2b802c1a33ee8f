"""The first line of a text file with rows: its encoding, its line ends, and the separator of its columns."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainyard_trainer.errors import ConfigError

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""The characters that may separate the columns of a CSV file."""

SEPARATOR_LINE = re.compile(r"sep=.(?:\r\n|\r|\n)")
"""The line that Excel writes before the header."""

LINE_END = re.compile(r"\r\n|\r|\n")

OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""The bytes with which text in UTF-16 and UTF-32 begins."""


class CsvHeader(NamedTuple):
    """How to read a CSV file."""

    separator: str
    start: int
    """The number of characters before the header."""
    columns: tuple[str, ...]


def require_utf8_text(file: str, data: bytes) -> None:
    """Raise ConfigError if the first bytes of a file are those of text in another encoding than UTF-8."""
    if data.startswith(OTHER_ENCODINGS) or b"\0" in data[:1000]:
        raise ConfigError(
            f"{file} is no text in UTF-8: it has zero bytes, as text in UTF-16 has. Save it as UTF-8, in "
            'Excel as "CSV UTF-8".'
        )


def read_header(text: str, file: str, needed: Sequence[str] = ()) -> CsvHeader:
    """Find the header of a CSV file, and the separator with which it has the needed columns.

    If none has them, or none are needed, the separator is the one that makes the most columns.
    """
    noted = SEPARATOR_LINE.match(text)
    start = noted.end() if noted else 0
    line = LINE_END.split(text[start:].lstrip("\r\n"), maxsplit=1)[0]
    found = {each: next(csv.reader([line], delimiter=each), []) for each in _ordered(file)}
    fitting = [each for each in found if needed and set(needed) <= set(found[each])]
    separator = fitting[0] if fitting else max(found, key=lambda each: len(found[each]))
    return CsvHeader(separator, start, tuple(found[separator]))


def usual_separator(file: str) -> str:
    """Return the separator that the ending of a file's name stands for."""
    return "\t" if file.lower().endswith(".tsv") else ","


def _ordered(file: str) -> list[str]:
    """Return the separators, the usual one of the file first."""
    return sorted(SEPARATORS, key=lambda each: each != usual_separator(file))
