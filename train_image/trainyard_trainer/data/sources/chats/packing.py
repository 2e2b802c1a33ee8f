"""Pack samples into rows of equal length: best fit, longest sample first."""

from __future__ import annotations

import bisect

import numpy as np


def pack(lengths: np.ndarray, row_tokens: int) -> np.ndarray:
    """Return the row of each sample, (N,) int64; rows are numbered from 0.

    Each sample goes into the row with the least room that is enough for it. No sample may be longer than
    `row_tokens`. The result depends on the lengths alone.
    """
    if len(lengths) and int(lengths.max()) > row_tokens:
        raise ValueError(f"a sample has {lengths.max()} tokens, and a row {row_tokens}")
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    rooms: list[int] = []  # the different rooms of the rows that are not full, in ascending order
    by_room: dict[int, list[int]] = {}
    for sample in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[sample])
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        else:
            room, row = row_tokens, num_rows
            num_rows += 1
        rows[sample] = row
        left = room - length
        if left:
            if left not in by_room:
                bisect.insort(rooms, left)
                by_room[left] = []
            by_room[left].append(row)
    return rows


def one_row_each(lengths: np.ndarray) -> np.ndarray:
    """Return the row of each sample without packing, (N,) int64."""
    return np.arange(len(lengths))


def padded_length(longest: int, context_length: int, multiple: int = 8) -> int:
    """Return the length of rows of one sample each: the longest one, rounded up as GPUs like it."""
    return min(-(-longest // multiple) * multiple, context_length)
