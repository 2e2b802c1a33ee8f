"""The training batches of the Ray loader.

Data that are held in memory are used in the order of the torch loader. Streamed data are not: the order of
raw samples depends on the number of workers, and encoded samples come in the order in which Ray's tasks end.
A run that resumes within an epoch therefore needs to know which samples were used, not only how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np
import pyarrow as pa
import ray
import ray.data
import ray.train.collective
import torch
from typing_extensions import assert_never

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch, order_of_epoch, parts_of_epoch
from trainyard_trainer.data.loading.chunks import (
    Ahead,
    Columns,
    SampleChunk,
    copied,
    cut,
    empty_columns,
    in_order,
    shuffled,
)
from trainyard_trainer.data.loading.raw_reading import RawParts, SampleWindows
from trainyard_trainer.data.loading.ray_source import (
    CHUNKS_AHEAD,
    STORE_SHARE,
    Arrays,
    Source,
    Streams,
    ahead,
    open_source,
)
from trainyard_trainer.data.loading.reading import read_sample
from trainyard_trainer.data.loading.remaining import RemainingSamples
from trainyard_trainer.data.prepared import Prepared, PreparedInfo
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import RunError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

HANDED_OUT = "handed_out"
"""The name of the saved state: a bit per sample, set if the current epoch has used it."""

CHUNK_BYTES = 2**22
"""The size of the samples that a worker requests at once. A request costs as much as 1,000 small samples."""

SHUFFLE_BYTES = 2**27
"""The size of the shuffle buffer of a worker."""


class RayBatches:
    """The training batches of one worker. All workers of a group have to construct it at the same time."""

    def __init__(
        self,
        prepared: Prepared,
        length: Length,
        start: Trained,
        saved: dict[str, torch.Tensor],
        worker: Worker,
        config: TrainerConfig,
        *,
        share: Share | None = None,
        held_share: float = STORE_SHARE,
    ) -> None:
        self.start = start
        self.worker = worker
        self.before = np.zeros(length.num_samples, bool)
        """Whether any worker used a sample of the current epoch before this group started, (N,) bool."""
        if start.steps_in_epoch:
            self.before[:] = np.unpackbits(saved[HANDED_OUT].numpy(), count=length.num_samples)
        self.used_here = np.zeros(length.num_samples, bool)
        """Whether a sample of the current epoch was used since then, by this worker."""

        work = RemainingSamples(
            prepared, length, start, self.before.copy(), worker.world_size, config
        )
        nodes = worker.gathered(node_here())
        opened = open_source(work, nodes, held_share) if worker.rank == 0 else None
        source = (share or through_store)(opened)
        self.source = batches_of(source, work, worker)
        self.is_checked = isinstance(source, Streams)
        """Whether a sample might come twice. It cannot where an order of all samples is divided."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.used_here[:] = False
        if epoch != self.start.epoch:
            self.before[:] = False
        for batch in self.source.epoch(epoch):
            ids = batch.ids.numpy()
            if self.is_checked and (self.before[ids] | self.used_here[ids]).any():
                raise given_twice()
            self.used_here[ids] = True
            yield batch
        if self.is_checked:
            self._used_by_all()

    def state(self) -> dict[str, torch.Tensor]:
        return {HANDED_OUT: self._used_by_all() | torch.from_numpy(np.packbits(self.before))}

    def _used_by_all(self) -> torch.Tensor:
        """Return a bit per sample that any worker has used. All workers call it at the same time.

        Raises RunError if two workers had the same sample.
        """
        used_here = torch.from_numpy(np.packbits(self.used_here)).to(self.worker.device)
        used = self.worker.sum(used_here).cpu()
        count = self.worker.sum(torch.tensor(int(self.used_here.sum()), device=self.worker.device))
        # The sum of the bits is their union and has as many bits, unless two workers had the same sample.
        if int(np.unpackbits(used.numpy()).sum()) != int(count):
            raise given_twice()
        return used


def given_twice() -> RunError:
    """Return the error for a sample that Ray Data gave twice in one epoch."""
    return RunError(
        "Ray Data gave a sample twice in one epoch. Start the run again: it goes on from its last "
        "checkpoint. If it comes back, use data.loader: torch."
    )


Share = Callable[[Source | None], Source]
"""A function that gives each worker the value of rank 0."""


def through_store(opened: Source | None) -> Source:
    """Share the value of rank 0 with all workers by way of Ray's object store."""
    # A reference keeps the broadcast small. Ray resolves a reference that is not in a list.
    references = [ray.put(opened)] if opened else None
    return ray.get(ray.train.collective.broadcast_from_rank_zero(references)[0])


def node_here() -> str:
    return ray.get_runtime_context().get_node_id()


def batches_of(source: Source, work: RemainingSamples, worker: Worker) -> Held | Streamed:
    """Return what makes the batches of a worker."""
    is_pinned = worker.device.type == "cuda"
    match source:
        case Arrays():
            return Held(source, work, worker)
        case RawParts():
            windows = SampleWindows(source, work, worker.rank, is_pinned=is_pinned)
            return Streamed(windows, work, worker)
        case Streams():
            chunks = all_chunks(source, work, worker.rank, is_pinned=is_pinned)
            return Streamed(ahead(chunks, work.data.ray_nodes), work, worker)
        case _:
            assert_never(source)


class Held:
    """Batches from memory that the processes of a machine share, in the order of the torch loader."""

    def __init__(self, source: Arrays, work: RemainingSamples, worker: Worker) -> None:
        self.work = work
        self.rank = worker.rank
        self.is_pinned = worker.device.type == "cuda"
        self.columns = source.columns

    def epoch(self, epoch: int) -> Iterator[Batch]:
        # For a GPU, batches are prefetched while it computes.
        batches = self._batches(epoch)
        return Ahead(batches, CHUNKS_AHEAD) if self.is_pinned else batches

    def _batches(self, epoch: int) -> Iterator[Batch]:
        work, config = self.work, self.work.config
        order = order_of_epoch(
            work.length.num_samples, epoch, seed=config.train.seed, shuffle=config.data.shuffle
        )
        is_unused = np.zeros(len(order), bool)
        is_unused[work.unused(epoch)] = True
        rest, first_step = order[is_unused[order]], work.first_step(epoch)
        for part in parts_of_epoch(rest, work.length, first_step, self.rank, work.world_size):
            yield copied(self.columns, part, is_pinned=self.is_pinned)


class Streamed:
    """Batches of a stream of chunks, which goes on from one epoch to the next.

    During validation, the first samples of the next epoch are prefetched.
    """

    def __init__(
        self, chunks: Iterator[SampleChunk], work: RemainingSamples, worker: Worker
    ) -> None:
        self.work = work
        self.rank = worker.rank
        self.is_pinned = worker.device.type == "cuda"
        self.chunks = chunks

    def epoch(self, epoch: int) -> Iterator[Batch]:
        # For a GPU, batches are prefetched while it computes.
        batches = self._batches(epoch)
        return Ahead(batches, CHUNKS_AHEAD) if self.is_pinned else batches

    def _batches(self, epoch: int) -> Iterator[Batch]:
        work = self.work
        sizes = work.streamed(epoch)
        apart = work.apart(epoch)
        batches = cut(self.chunks, filter(None, sizes))
        for step, size in enumerate(sizes):
            parts = [next(batches)] if size else []
            if step == len(sizes) - 1 and self.rank < len(apart):
                parts.append(self._sample(int(apart[self.rank])))
            yield Batch.concat(parts) if parts else no_samples(work.prepared.info)

    def _sample(self, sample: int) -> Batch:
        table = read_sample(self.work.prepared, sample)
        columns = to_arrays(table, self.work.prepared.info)
        return copied(columns, np.zeros(1, np.int64), is_pinned=self.is_pinned)


def all_chunks(
    source: Streams, work: RemainingSamples, rank: int, *, is_pinned: bool
) -> Iterator[Batch]:
    """Iterate over a worker's part of the streams of all epochs, limited to the samples that are due.

    The stream of an epoch starts while the last samples of the epoch before are handed out, since Ray needs a
    few tenths of a second until the first samples come.
    """

    def chunks_of(epoch: int) -> Iterator[Batch]:
        iterator = source.of_epoch(epoch, rank, is_begun=work.first_step(epoch) > 0)
        return stream(iterator, work, epoch, rank, is_pinned=is_pinned)

    due = {
        epoch: sum(work.streamed(epoch)) for epoch in range(work.start.epoch, work.length.epochs)
    }
    epochs = [epoch for epoch, samples in due.items() if samples]
    last_samples = SHUFFLE_BYTES // work.prepared.info.bytes_per_sample
    chunks, following = chunks_of(epochs[0]) if epochs else iter(()), None
    for epoch, next_epoch in zip_longest(epochs, epochs[1:]):
        left = due[epoch]
        for chunk in chunks:
            if left <= last_samples and following is None and next_epoch is not None:
                following = Ahead(chunks_of(next_epoch), CHUNKS_AHEAD)
            part = chunk.rows(0, left)
            left -= len(part)
            yield part
            if not left:
                break
        if left:
            raise RunError(
                f"Ray Data gave worker {rank} {left:,} samples less than were due in epoch {epoch + 1}: "
                "blocks were lost. Start the run again: it goes on from its last checkpoint."
            )
        if next_epoch is not None:
            chunks, following = following or chunks_of(next_epoch), None


def stream(
    iterator: ray.data.DataIterator,
    work: RemainingSamples,
    epoch: int,
    rank: int,
    *,
    is_pinned: bool,
) -> Iterator[Batch]:
    """Iterate over a worker's part of the stream of an epoch, in chunks."""
    info = work.prepared.info
    size = info.bytes_per_sample
    rows = max(CHUNK_BYTES // size, work.length.global_batch_size // work.world_size)
    # Whole blocks: batches of a size would be copied together out of them.
    blocks = iterator.iter_batches(
        batch_size=None,  # type: ignore[arg-type]  # its documentation allows None
        batch_format="pyarrow",
        prefetch_batches=CHUNKS_AHEAD,
    )
    chunks = (chunk for block in blocks for chunk in chunks_of(block, rows, info))
    if not work.config.data.shuffle:
        return in_order(chunks, is_pinned=is_pinned)
    # Ray's shuffle buffer would keep its samples in the object store, and stop the tasks that fill it.
    room = max(rows, min(SHUFFLE_BYTES // size, sum(work.streamed(epoch))))
    random = np.random.default_rng([work.config.train.seed, epoch, rank])
    return shuffled(chunks, room, random, is_pinned=is_pinned)


def chunks_of(block: pa.Table, rows: int, info: PreparedInfo) -> Iterator[Columns]:
    """Divide a block of Ray Data into chunks of at most so many rows, which share its memory."""
    for batch in block.to_batches(max_chunksize=rows):
        yield to_arrays(pa.Table.from_batches([batch]), info)


def to_arrays(table: pa.Table, info: PreparedInfo) -> Columns:
    """Return the columns of a table as arrays that share its memory."""
    return decode(table, info.decoded)


def no_samples(info: PreparedInfo) -> Batch:
    """Return a batch without any samples."""
    return copied(empty_columns(info, 0), np.empty(0, np.int64), is_pinned=False)
