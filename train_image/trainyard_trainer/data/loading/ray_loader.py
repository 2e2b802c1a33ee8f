"""Batches from Ray Data: read and decoded by tasks that Ray puts where there is room.

What fits into a share of the object store lies there decoded, once per machine, and comes in the order of the
torch loader. More than that is read anew in each epoch and streamed to the workers, in the order in which
tasks end. So a run that goes on in mid-epoch must know which samples were handed out, not how many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import ray
import ray.data
import ray.exceptions
import ray.train.collective
import torch
from ray.data import ExecutionResources, RandomSeedConfig

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch, order_of_epoch, parts_of_epoch
from trainyard_trainer.data.loading.chunks import (
    Ahead,
    Columns,
    copied,
    cut,
    in_order,
    joined,
    shuffled,
)
from trainyard_trainer.data.loading.reading import read_part, read_sample
from trainyard_trainer.data.prepared import DatasetInfo, Prepared, decode
from trainyard_trainer.errors import RunError
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.run_folder.progress import Length, Trained

T = TypeVar("T")

HANDED_OUT = "handed_out"
"""Name of the state: a bit per sample, set if the epoch under way has used it."""

STORE_SHARE = 0.25
"""Part of the object store that the data of a run may fill."""

PART_BYTES = 2**25
"""Decoded images of one task, about."""

CHUNK_BYTES = 2**22
"""Images that a worker asks Ray for at once: asking takes as long as 1,000 tiny images do."""

CHUNKS_AHEAD = 2

SHUFFLE_BYTES = 2**27
"""Images among which a worker shuffles."""

WAIT_S = 900.0
"""How long no images may come before the run gives up."""


class RayBatches:
    """Training batches of one worker. All workers of a group must make theirs at the same time."""

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
        """Used in the epoch under way before this group of workers started, by any of them."""
        if start.steps_in_epoch:
            self.before[:] = np.unpackbits(saved[HANDED_OUT].numpy(), count=length.num_samples)
        self.own = np.zeros(length.num_samples, bool)
        """Used in it since then, by this worker."""

        work = RemainingSamples(
            prepared, length, start, self.before.copy(), worker.world_size, config
        )
        nodes = worker.gathered(node_here())
        opened = open_source(work, nodes, held_share) if worker.rank == 0 else None
        source = (share or through_store)(opened)
        self.source: Held | Streamed = (
            Held(source, work, worker)
            if isinstance(source, Arrays)
            else Streamed(source, work, worker)
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.own[:] = False
        if epoch != self.start.epoch:
            self.before[:] = False
        for batch in self.source.epoch(epoch):
            ids = batch.ids.numpy()
            # An order has no sample twice; what streams through Ray's tasks is looked at.
            if isinstance(self.source, Streamed) and (self.before[ids] | self.own[ids]).any():
                raise given_twice()
            self.own[ids] = True
            yield batch
        self._used_by_all()

    def state(self) -> dict[str, torch.Tensor]:
        return {HANDED_OUT: self._used_by_all() | torch.from_numpy(np.packbits(self.before))}

    def _used_by_all(self) -> torch.Tensor:
        """A bit per sample. All workers ask at the same time; raises RunError if two had the same one."""
        own = torch.from_numpy(np.packbits(self.own)).to(self.worker.device)
        used = self.worker.sum(own).cpu()
        count = self.worker.sum(torch.tensor(int(self.own.sum()), device=self.worker.device))
        # The sum of their bits is the union, and has as many of them, unless two were the same.
        if int(np.unpackbits(used.numpy()).sum()) != int(count):
            raise given_twice()
        return used


def given_twice() -> RunError:
    return RunError(
        "Ray Data gave a sample twice in one epoch. Start the run again: it goes on from its last "
        "checkpoint. If it comes back, use data.loader: torch."
    )


@dataclass(frozen=True, slots=True)
class RemainingSamples:
    """What lies before a group of workers; each of them knows the same."""

    prepared: Prepared
    length: Length
    start: Trained
    used: np.ndarray
    """Samples that the epoch under way has used when the group starts."""
    world_size: int
    config: TrainerConfig

    def first_step(self, epoch: int) -> int:
        return self.start.steps_in_epoch if epoch == self.start.epoch else 0

    def unused(self, epoch: int) -> np.ndarray:
        """Ids of the samples from which an epoch's batches come, once the group begins with it."""
        if self.first_step(epoch):
            return np.flatnonzero(~self.used)
        return np.arange(self.length.num_samples)

    def apart(self, epoch: int) -> np.ndarray:
        """Ids that are kept out of the stream, which gives each worker as many samples as any other.

        The first workers get them, one each, with an epoch's last batch. A full batch needs none.
        """
        last = self.length.batch_size(self.length.steps_per_epoch - 1)
        unused = self.unused(epoch)
        return unused[len(unused) - last % self.world_size :]

    def streamed(self, epoch: int) -> list[int]:
        """How many samples of each batch one worker gets from the stream."""
        steps = range(self.first_step(epoch), self.length.steps_per_epoch)
        return [self.length.batch_size(step) // self.world_size for step in steps]


@dataclass(frozen=True, slots=True)
class Arrays:
    """All samples, in the order of their ids."""

    pixels: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, slots=True)
class Streams:
    """An iterator for each worker, by rank."""

    rest: list[ray.data.DataIterator] | None
    """Over what is left of the epoch under way; None between two epochs."""
    full: list[ray.data.DataIterator]


def open_source(work: RemainingSamples, nodes: list[str], held_share: float) -> Arrays | Streams:
    """What rank 0 shares with the other workers, which are on these nodes, by rank."""
    configure(work.config)
    size = work.length.num_samples * work.prepared.info.bytes_per_sample
    if size <= held_share * smallest_store():
        return read_all(work)
    epoch, is_begun = work.start.epoch, work.start.steps_in_epoch > 0
    return Streams(
        rest=split(work, epoch, nodes) if is_begun else None,
        full=split(work, epoch + is_begun, nodes),
    )


Share = Callable[[Arrays | Streams | None], Arrays | Streams]
"""Gives each worker what rank 0 passed."""


def through_store(opened: Arrays | Streams | None) -> Arrays | Streams:
    # A broadcast should be small, hence the reference; it would resolve one that is not in a list.
    references = [ray.put(opened)] if opened else None
    return ray.get(ray.train.collective.broadcast_from_rank_zero(references)[0])


def node_here() -> str:
    return ray.get_runtime_context().get_node_id()


def configure(config: TrainerConfig) -> None:
    """Say where data sets of this process may run, and how much of the object store they may fill."""
    options = ray.data.DataContext.get_current().execution_options
    store = ray.cluster_resources()["object_store_memory"]
    options.resource_limits = ExecutionResources.for_limits(object_store_memory=STORE_SHARE * store)
    options.preserve_order = not config.data.shuffle
    options.label_selector = config.data.ray_nodes


def smallest_store() -> float:
    """Bytes of the smallest object store of a node where workers may be."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return min(node["object_store_memory"] for node in nodes if node.get("CPU"))


def read(work: RemainingSamples, ids: np.ndarray, seed: list[int]) -> ray.data.Dataset:
    """These training images as raw pixels, a block per task; shuffled, in another order each time."""
    prepared = work.prepared
    wanted = np.zeros(prepared.num_train, bool)
    wanted[ids] = True
    tasks, first = [], 0
    for file, rows in zip(prepared.train.files, prepared.train.rows, strict=True):
        parts = -(-rows * prepared.info.bytes_per_sample // PART_BYTES)
        if wanted[first : first + rows].any():
            tasks += [{"file": [file], "part": [part], "parts": [parts]} for part in range(parts)]
        first += rows
    bits = None if wanted.all() else np.packbits(wanted)

    def read_task(task: pa.Table) -> pa.Table:
        return read_part(prepared, bits, **task.to_pylist()[0])

    dataset = ray.data.from_blocks([pa.table(task) for task in tasks])
    if work.config.data.shuffle:
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        dataset = dataset.randomize_block_order(seed=RandomSeedConfig(number))
    return dataset.map_batches(read_task, batch_size=None, batch_format="pyarrow")


def split(work: RemainingSamples, epoch: int, nodes: list[str]) -> list[ray.data.DataIterator]:
    """The samples that are left from an epoch on, in a stream of equal parts, anew for each epoch."""
    ids = np.setdiff1d(work.unused(epoch), work.apart(epoch), assume_unique=True)
    seed = [work.config.train.seed, work.start.step, epoch]
    return read(work, ids, seed).streaming_split(work.world_size, equal=True, locality_hints=nodes)


def read_all(work: RemainingSamples) -> Arrays:
    samples, info = work.length.num_samples, work.prepared.info
    pixels = np.empty((samples, *info.shape), np.uint8)
    labels = np.empty(samples, np.int64)
    times = np.zeros(samples, np.int64)
    tables: Iterable[pa.Table] = read(work, np.arange(samples), seed=[0]).iter_batches(
        batch_size=None, batch_format="pyarrow"
    )
    for table in ahead(tables, work.config.data.ray_nodes):
        columns = decode(table, replace(info, encoding="raw"))
        ids = columns["id"]
        pixels[ids], labels[ids] = columns["image"], columns["label"]
        times[ids] += 1
    if (times != 1).any():
        raise RunError(
            f"Ray Data read {times.sum():,} samples of {work.prepared.path}, {(times > 0).sum():,} of them "
            f"different, where {samples:,} were due. Start the run again, or use data.loader: torch."
        )
    return Arrays(pixels, labels)


class Held:
    """Batches from memory that the processes of a machine share, in the order of the torch loader."""

    def __init__(self, source: Arrays, work: RemainingSamples, worker: Worker) -> None:
        self.work = work
        self.rank = worker.rank
        self.is_pinned = worker.device.type == "cuda"
        self.columns = source.pixels, source.labels, np.arange(len(source.labels))

    def epoch(self, epoch: int) -> Iterator[Batch]:
        # What a GPU waits for is made while it computes.
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
    """Batches from Ray's tasks. While an epoch is validated, the next one's first images come already."""

    def __init__(self, source: Streams, work: RemainingSamples, worker: Worker) -> None:
        self.work = work
        self.rank = worker.rank
        self.is_pinned = worker.device.type == "cuda"
        chunks = all_chunks(source, work, self.rank, is_pinned=self.is_pinned)
        self.chunks = ahead(chunks, work.config.data.ray_nodes)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        work = self.work
        sizes = work.streamed(epoch)
        apart = work.apart(epoch)
        batches = cut(self.chunks, filter(None, sizes))
        for step, size in enumerate(sizes):
            parts = [next(batches)] if size else []
            if step == len(sizes) - 1 and self.rank < len(apart):
                parts.append(self._sample(int(apart[self.rank])))
            yield joined(parts) if parts else no_samples(work.prepared.info)

    def _sample(self, sample: int) -> Batch:
        table = read_sample(self.work.prepared, sample)
        columns = to_arrays(table, self.work.prepared.info)
        return copied(columns, np.zeros(1, np.int64), is_pinned=self.is_pinned)


def all_chunks(
    source: Streams, work: RemainingSamples, rank: int, *, is_pinned: bool
) -> Iterator[Batch]:
    """A worker's part of the streams of all epochs, one after the other, and no sample more."""
    for epoch in range(work.start.epoch, work.length.epochs):
        due = sum(work.streamed(epoch))
        if not due:
            continue
        streams = source.rest if work.first_step(epoch) else source.full
        assert streams is not None
        for chunk in stream(streams[rank], work, epoch, rank, is_pinned=is_pinned):
            part = Batch(*(column[:due] for column in chunk))
            due -= len(part.ids)
            yield part
            if not due:
                break
        if due:
            raise RunError(
                f"Ray Data gave worker {rank} {due:,} samples less than were due in epoch {epoch + 1}: "
                "blocks were lost. Start the run again: it goes on from its last checkpoint."
            )


def stream(
    iterator: ray.data.DataIterator,
    work: RemainingSamples,
    epoch: int,
    rank: int,
    *,
    is_pinned: bool,
) -> Iterator[Batch]:
    """A worker's part of the stream of an epoch, in chunks."""
    info = work.prepared.info
    size = info.bytes_per_sample
    rows = max(CHUNK_BYTES // size, work.length.global_batch_size // work.world_size)
    tables = iterator.iter_batches(
        batch_size=rows, batch_format="pyarrow", prefetch_batches=CHUNKS_AHEAD
    )
    chunks = (to_arrays(table, info) for table in tables)
    if not work.config.data.shuffle:
        return in_order(chunks, is_pinned=is_pinned)
    # Not in Ray's own buffer: it keeps its samples in the object store, and stops the tasks that fill it.
    room = max(rows, min(SHUFFLE_BYTES // size, sum(work.streamed(epoch))))
    random = np.random.default_rng([work.config.train.seed, epoch, rank])
    return shuffled(chunks, room, random, is_pinned=is_pinned)


def to_arrays(table: pa.Table, info: DatasetInfo) -> Columns:
    """Views of raw pixels in Arrow."""
    columns = decode(table, replace(info, encoding="raw"))
    return columns["image"], columns["label"], columns["id"]


def no_samples(info: DatasetInfo) -> Batch:
    none = torch.empty(0, dtype=torch.int64)
    return Batch(torch.empty(0, *info.shape, dtype=torch.uint8), none, none)


def ahead(items: Iterable[T], nodes: dict[str, str] | None) -> Ahead[T]:
    """What comes from Ray's tasks on these nodes, made by a thread of its own."""
    return Ahead(from_ray(items), CHUNKS_AHEAD, silence_s=WAIT_S, on_silence=lambda: silence(nodes))


def from_ray(items: Iterable[T]) -> Iterator[T]:
    try:
        yield from items
    except ray.exceptions.RayError as error:
        # Ray returns an error of a task as text, traceback included.
        errors = re.escape(RunError.__module__)
        explained = re.search(rf"^{errors}\.\w+: (.+)", str(error), re.MULTILINE)
        raise RunError(explained[1] if explained else f"Ray Data failed: {error}") from error


def silence(nodes: dict[str, str] | None) -> RunError:
    cpus = ray.cluster_resources().get("CPU", 0)
    free = ray.available_resources().get("CPU", 0)
    place = f" on a node with the labels {nodes} (data.ray_nodes)" if nodes else ""
    return RunError(
        f"no images came from Ray Data for {WAIT_S:.0f} s. Its tasks need a CPU beside the workers"
        f"{place}; of {cpus:.0f} CPUs in all {free:.0f} are free. Add some, or use data.loader: torch."
    )
