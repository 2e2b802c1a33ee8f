"""Output of the command-line tools: tables, sizes and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

WIDTH = 24
"""The width of the bar in characters."""

REDRAW_S = 0.1
"""The shortest time between two redraws of the bar."""

PATIENCE_S = 0.5
"""Seconds before the bar appears: shorter work shows none."""


def table_text(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, one line per row; columns of numbers are right-aligned."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_number = [
        all(cell[:1].isdigit() or cell == "-" for cell in column)
        for column in zip(*rows, strict=True)
    ] or [False] * len(headings)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


class Bar:
    """A progress bar on standard error, for work that takes long on a terminal."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._began = self._drawn = time.monotonic()
        self._is_shown = False
        self._is_seen = sys.stderr.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        """Add to the number of finished items."""
        self._done += count
        now = time.monotonic()
        is_due = now - self._drawn >= REDRAW_S and now - self._began >= PATIENCE_S
        if self._is_seen and is_due:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn, self._is_shown = now, True
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        left_s = (now - self._began) * (1 - share) / share if share else 0.0
        full = round(share * WIDTH)
        print(
            f"\r\033[K{'█' * full}{'░' * (WIDTH - full)} {share:4.0%}  {self._what}  {left_s:.0f} s left",
            end="",
            file=sys.stderr,
            flush=True,
        )
