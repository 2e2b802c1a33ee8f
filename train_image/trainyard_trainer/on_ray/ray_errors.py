"""Ray's own errors in one line: its messages have many lines, colours, and tracebacks of other processes."""

from __future__ import annotations

import re

SENTENCE_END = re.compile(r"(?<=[.!?])\s")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def in_one_line(error: BaseException) -> str:
    """Return the type of an error and the first sentences of its message, which are on its first line."""
    text = COLOUR.sub("", str(error)).strip()
    first = text.splitlines()[0].strip() if text else ""
    if first.endswith(":"):
        # It introduces a list, which is left out.
        first = SENTENCE_END.split(first)[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
