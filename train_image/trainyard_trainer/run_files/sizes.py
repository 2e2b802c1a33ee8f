"""Sizes in bytes as text for people, the same in the launcher and in the trainer's tools."""

from __future__ import annotations

UNITS = ("KiB", "MiB", "GiB", "TiB")
"""Units after the byte, each 1024 times the one before."""


def size_text(size: float) -> str:
    """Return a number of bytes in the largest unit of which it has at least one.

    >>> size_text(35_840)
    '35 KiB'
    >>> size_text(5_400_000)
    '5.1 MiB'
    """
    if size < 1024:
        return f"{size:.0f} B"
    power = 1
    while size >= 1024 ** (power + 1) and power < len(UNITS):
        power += 1
    digits = 0 if power == 1 else 1
    return f"{size / 1024**power:,.{digits}f} {UNITS[power - 1]}"
