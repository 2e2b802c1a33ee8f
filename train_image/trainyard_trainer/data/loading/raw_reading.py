"""Stream raw samples, which need no decoding, in the worker's own process.

The samples come in windows. A window is read into memory as a whole, and its samples are handed out in a
random order. Meanwhile threads read the next window, which may be the first one of the next epoch.

The order follows from the seed, the epoch and the number of workers, and in a resumed epoch from the samples
that were used before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs

from trainyard_trainer.data.loading.batch import Batch, order_of_epoch
from trainyard_trainer.data.loading.chunks import copied, empty_columns
from trainyard_trainer.data.loading.remaining import RemainingSamples
from trainyard_trainer.data.prepared import ID, Prepared, PreparedInfo
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import RunError

WINDOW_BYTES = 2**26
"""The size of a window. A worker has two in memory: it uses one and reads the other."""

PART_BYTES = 2**23
"""The size up to which neighbouring row groups of a file are read at once."""

READERS = 4
"""The number of parts that a worker reads at the same time, at most."""

FOOTERS_AT_ONCE = 16
"""The number of files that are opened at the same time to learn their row groups."""


@dataclass(frozen=True, slots=True)
class RawPart:
    """Neighbouring row groups of a Parquet file, which are read at once."""

    file: str
    groups: range
    first: int
    """The id of the first sample; the others follow in the order of the rows."""
    rows: int


@dataclass(frozen=True, slots=True)
class RawParts:
    """All parts of the training split, in the order of the samples' ids."""

    parts: tuple[RawPart, ...]


def find_parts(prepared: Prepared) -> RawParts:
    """Divide the files of the training split into parts.

    Raises ConfigError for a file that is missing or damaged, and RunError if its storage fails, or if it has
    more or fewer rows than dataset.json counts.
    """
    filesystem = prepared.open_filesystem()
    most = max(1, PART_BYTES // prepared.info.bytes_per_sample)
    parts: list[RawPart] = []
    first = 0
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        footers = pool.map(lambda file: rows_of_groups(filesystem, file), prepared.train.files)
        for file, count, groups in zip(
            prepared.train.files, prepared.train.rows, footers, strict=True
        ):
            if sum(groups) != count:
                raise RunError(
                    f"{file} has {sum(groups):,} samples where dataset.json counts {count:,}. "
                    "Prepare the data again: trainyard data prepare."
                )
            for part in joined(groups, most):
                rows = sum(groups[group] for group in part)
                parts.append(RawPart(file, part, first, rows))
                first += rows
    return RawParts(tuple(parts))


def rows_of_groups(filesystem: fs.FileSystem, file: str) -> list[int]:
    """Return the number of rows of each row group of a file."""
    with explained_errors(file), filesystem.open_input_file(file) as stream:
        footer = pq.read_metadata(stream)
    return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]


def joined(groups: Sequence[int], most: int) -> Iterator[range]:
    """Join neighbouring row groups of so many rows each, up to `most` rows."""
    start = rows = 0
    for group, count in enumerate(groups):
        if group > start and rows + count > most:
            yield range(start, group)
            start, rows = group, 0
        rows += count
    yield range(start, len(groups))


Piece = tuple[RawPart, np.ndarray]
"""A part, and the numbers of those of its rows that are due, (N,) int64."""


def share_of_epoch(
    parts: Sequence[RawPart], work: RemainingSamples, epoch: int, rank: int
) -> Iterator[Piece]:
    """Iterate over what a worker reads in an epoch.

    The parts are in an order that is the same for all workers, and each worker gets an equal stretch of their
    samples. So two workers may share a part.
    """
    is_due = np.zeros(work.length.num_samples, bool)
    is_due[work.unused(epoch)] = True
    is_due[work.apart(epoch)] = False
    left = sum(work.streamed(epoch))
    before = rank * left
    config = work.config
    order = order_of_epoch(len(parts), epoch, seed=config.train.seed, shuffle=config.data.shuffle)
    for part in (parts[index] for index in order):
        due = np.flatnonzero(is_due[part.first : part.first + part.rows])
        rows = due[before : before + left]
        before = max(before - len(due), 0)
        left -= len(rows)
        if len(rows):
            yield part, rows
        if not left:
            return


def in_windows(pieces: Iterable[Piece], room: int) -> Iterator[list[Piece]]:
    """Group pieces into windows of at most `room` samples. No piece may have more."""
    window: list[Piece] = []
    filled = 0
    for part, rows in pieces:
        if filled + len(rows) > room:
            yield window
            window, filled = [], 0
        window.append((part, rows))
        filled += len(rows)
    if window:
        yield window


@dataclass(frozen=True, slots=True)
class Window:
    """Samples in memory, in the order in which they are handed out."""

    columns: dict[str, np.ndarray]
    order: np.ndarray
    is_pinned: bool
    reads: list[Future[None]]
    """What fills the columns."""

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, start: int, end: int) -> Batch:
        """Copy the samples from `start` up to, but without, `end` into a batch."""
        return copied(self.columns, self.order[start:end], is_pinned=self.is_pinned)


class SampleWindows(Iterator[Window]):
    """The windows of one worker in all epochs that are due. At most two of them are in memory.

    A window must not be used any more once the next one is asked for.
    """

    def __init__(
        self, source: RawParts, work: RemainingSamples, rank: int, *, is_pinned: bool
    ) -> None:
        info = work.prepared.info
        self._filesystem = work.prepared.open_filesystem()
        self._info = info
        self._is_pinned = is_pinned
        # All epochs but the first one are whole.
        epochs = range(work.start.epoch, work.length.epochs)[:2]
        most = max((sum(work.streamed(epoch)) for epoch in epochs), default=0)
        largest = max(part.rows for part in source.parts)
        room = min(most, max(WINDOW_BYTES // info.bytes_per_sample, largest))
        self._memory = cycle([empty_columns(info, room), empty_columns(info, room)])
        self._pool = ThreadPoolExecutor(readers_for(self._filesystem), "read")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._plans = plans(source, work, rank, room)
        self._begun = self._begin()

    def __next__(self) -> Window:
        window = self._begun
        if window is None:
            raise StopIteration
        for read in window.reads:
            read.result()
        self._begun = self._begin()
        return window

    def _begin(self) -> Window | None:
        """Begin to read the next window, in place of the last but one."""
        plan = next(self._plans, None)
        if plan is None:
            return None
        pieces, order = plan
        columns, reads, filled = next(self._memory), [], 0
        for part, rows in pieces:
            end = filled + len(rows)
            places = {name: column[filled:end] for name, column in columns.items()}
            reads.append(
                self._pool.submit(read_into, places, self._filesystem, self._info, part, rows)
            )
            filled = end
        return Window(columns, order, self._is_pinned, reads)


def readers_for(filesystem: fs.FileSystem) -> int:
    """Return the number of parts that are read at the same time.

    A read of a local file is CPU work. Beyond the threads that torch may use, readers slow each other down.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        return min(READERS, torch.get_num_threads())
    return READERS


def plans(
    source: RawParts, work: RemainingSamples, rank: int, room: int
) -> Iterator[tuple[list[Piece], np.ndarray]]:
    """Iterate over the windows of all epochs that are due: what is read, and its order."""
    for epoch in range(work.start.epoch, work.length.epochs):
        random = np.random.default_rng([work.config.train.seed, epoch, rank])
        for pieces in in_windows(share_of_epoch(source.parts, work, epoch, rank), room):
            order = np.arange(sum(len(rows) for _, rows in pieces))
            if work.config.data.shuffle:
                random.shuffle(order)
            yield pieces, order


def read_into(
    places: dict[str, np.ndarray],
    filesystem: fs.FileSystem,
    info: PreparedInfo,
    part: RawPart,
    rows: np.ndarray,
) -> None:
    """Read rows of a part into memory. Raises RunError if it has samples other than its position says."""
    with explained_errors(part.file), filesystem.open_input_file(part.file) as stream:
        parquet = pq.ParquetFile(stream, pre_buffer=True)
        # The readers are the threads: those of Arrow would cost more than they bring.
        table = parquet.read_row_groups(part.groups, columns=info.stored, use_threads=False)
    if not np.array_equal(table[ID].to_numpy(), np.arange(part.first, part.first + part.rows)):
        raise RunError(
            f"the ids of {part.file} are not {part.first:,}, {part.first + 1:,} and so on from row "
            f"group {part.groups.start} on. Prepare the data again: trainyard data prepare."
        )
    first = start = 0
    # One row group after the other: joined, they would be copied once more.
    for batch in table.to_batches():
        columns = decode(pa.Table.from_batches([batch]), info)
        due = rows[np.searchsorted(rows, first) : np.searchsorted(rows, first + len(batch))] - first
        for name, place in places.items():
            values = columns[name] if len(due) == len(batch) else columns[name][due]
            place[start : start + len(due)] = values
        first, start = first + len(batch), start + len(due)
