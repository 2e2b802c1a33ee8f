"""Streams of samples: shuffling, batches of exact sizes, and prefetching by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import ID, PreparedInfo

T = TypeVar("T")

Columns = Mapping[str, np.ndarray]
"""The columns of some samples by name, and their ids under the name `id`."""


def empty_columns(info: PreparedInfo, count: int) -> dict[str, np.ndarray]:
    """Return memory for the columns of so many samples, ids included."""
    columns = {
        name: np.empty((count, *column.shape), column.dtype)
        for name, column in info.columns.items()
    }
    return {**columns, ID: np.empty(count, np.int64)}


def copied(columns: Columns, places: np.ndarray, *, is_pinned: bool) -> Batch:
    """Copy the samples at these indices into a batch, in pinned memory if asked for."""
    copy = _taken_pinned if is_pinned else _taken
    tensors = {name: copy(column, places) for name, column in columns.items()}
    ids = tensors.pop(ID)
    return Batch(tensors, ids)


def _taken(column: np.ndarray, places: np.ndarray) -> torch.Tensor:
    # Faster than column[places], and the same.
    return torch.from_numpy(column.take(places, axis=0))


def _taken_pinned(column: np.ndarray, places: np.ndarray) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
    tensor = torch.empty((len(places), *column.shape[1:]), dtype=dtype, pin_memory=True)
    # In its default mode, "raise", numpy would make another copy first.
    np.take(column, places, axis=0, out=tensor.numpy(), mode="clip")
    return tensor


class SampleChunk(Protocol):
    """Some samples of a stream: a batch, or what makes batches of its rows."""

    def __len__(self) -> int: ...

    def rows(self, start: int, end: int) -> Batch:
        """Return the samples from `start` up to, but without, `end`."""


def cut(chunks: Iterable[SampleChunk], sizes: Iterable[int]) -> Iterator[Batch]:
    """Regroup chunks of any size into batches of these sizes, none of which is 0."""
    chunks = iter(chunks)
    chunk, start = next(chunks), 0
    for size in sizes:
        parts, missing = [], size
        while missing:
            if start == len(chunk):
                chunk, start = next(chunks), 0
            end = min(start + missing, len(chunk))
            parts.append(chunk.rows(start, end))
            start, missing = end, missing - (end - start)
        yield Batch.concat(parts)


def in_order(chunks: Iterable[Columns], *, is_pinned: bool) -> Iterator[Batch]:
    """Copy the chunks of a stream without a change of order."""
    for chunk in chunks:
        yield copied(chunk, np.arange(len(chunk[ID])), is_pinned=is_pinned)


def shuffled(
    chunks: Iterable[Columns], room: int, random: np.random.Generator, *, is_pinned: bool
) -> Iterator[Batch]:
    """Shuffle a stream with a buffer of `room` samples. No chunk may be larger than the buffer."""
    waiting: dict[str, np.ndarray] = {}
    filled = largest = 0
    for chunk in chunks:
        count = len(chunk[ID])
        largest = max(largest, count)
        if not waiting:
            waiting = {
                name: np.empty((room, *column.shape[1:]), column.dtype)
                for name, column in chunk.items()
            }
        stay = min(room - filled, count)
        for name, new in chunk.items():
            waiting[name][filled : filled + stay] = new[:stay]
        filled += stay
        if stay < count:
            places = random.choice(filled, count - stay, replace=False)
            yield copied(waiting, places, is_pinned=is_pinned)
            for name, new in chunk.items():
                waiting[name][places] = new[stay:]
    if waiting:
        order = random.permutation(filled)
        for start in range(0, filled, largest):
            yield copied(waiting, order[start : start + largest], is_pinned=is_pinned)


class Ahead(Generic[T]):
    """An iterator whose items a thread prefetches, up to `depth` of them.

    An exception of the thread is raised where the items are consumed. `on_silence` makes the exception that
    is raised if no item comes for `silence_s` seconds.
    """

    def __init__(
        self,
        items: Iterable[T],
        depth: int,
        *,
        silence_s: float | None = None,
        on_silence: Callable[[], Exception] = TimeoutError,
    ) -> None:
        self.silence_s = silence_s
        self.on_silence = on_silence
        self._made: queue.Queue[_Made[T]] = queue.Queue(depth)
        self._is_left = threading.Event()
        arguments = (items, self._made, self._is_left)
        threading.Thread(target=_make, args=arguments, name="ahead", daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            item, error = self._made.get(timeout=self.silence_s)
        except queue.Empty:
            raise self.on_silence() from None
        if error is not None:
            self._made.put((None, error))  # so that each later call raises it too
            raise error
        return cast(T, item)

    def __del__(self) -> None:
        self._is_left.set()
        with suppress(queue.Empty):
            self._made.get_nowait()  # wakes the thread if it waits for space in the queue


_Made = tuple[T | None, BaseException | None]


def _make(items: Iterable[T], made: queue.Queue[_Made[T]], is_left: threading.Event) -> None:
    try:
        for item in items:
            made.put((item, None))
            if is_left.is_set():
                return
        made.put((None, StopIteration()))
    except BaseException as error:  # noqa: BLE001 - raised where the items are consumed
        made.put((None, error))
