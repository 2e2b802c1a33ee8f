"""Open a prepared data set for the Ray loader: in memory, as parts of files, or as streams of Ray's tasks.

Data that fit into a share of the object store are read by Ray tasks anywhere in the cluster, and held
decoded, once per machine. Larger data are read anew in each epoch: encoded samples, which have to be
decoded, by Ray tasks that stream them to the workers, and raw samples by the workers themselves
(`raw_reading.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import numpy as np
import pyarrow as pa
import ray
import ray.data
import ray.exceptions
from ray.data import ExecutionResources, RandomSeedConfig

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.data.loading.chunks import Ahead, empty_columns
from trainyard_trainer.data.loading.raw_reading import RawParts, find_parts
from trainyard_trainer.data.loading.reading import read_part
from trainyard_trainer.data.loading.remaining import RemainingSamples
from trainyard_trainer.data.prepared import ID, Prepared
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.run_folder import failures

T = TypeVar("T")

STORE_SHARE = 0.25
"""The share of the object store that the data of a run may fill."""

PART_BYTES = 2**25
"""The approximate size of the decoded samples of one task."""

CHUNKS_AHEAD = 2
"""The number of items that are prefetched."""

WAIT_S = 900.0
"""The seconds without a sample after which the run fails."""


class FilePart(TypedDict):
    """A part of a Parquet file: some of its row groups."""

    file: str
    part: int
    parts: int
    """The number of parts of the file."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """All samples in the order of their ids, in memory."""

    columns: dict[str, np.ndarray]
    """By name, ids included; the first axis of each array has the samples."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams of samples: an iterator for each worker, by rank."""

    rest: list[ray.data.DataIterator] | None
    """Iterators over the remaining samples of the current epoch; None between two epochs."""
    full: tuple[list[ray.data.DataIterator], ...]
    """Two sets of iterators over whole epochs, which take turns: the next epoch starts while one ends."""

    def of_epoch(self, epoch: int, rank: int, *, is_begun: bool) -> ray.data.DataIterator:
        """Return the stream of a worker in an epoch, of which other workers may have used samples."""
        if is_begun:
            assert self.rest is not None
            return self.rest[rank]
        return self.full[epoch % len(self.full)][rank]


Source = Arrays | RawParts | Streams
"""Where the samples of a run come from."""


def open_source(work: RemainingSamples, nodes: list[str], held_share: float) -> Source:
    """Open the data on rank 0 for all workers; `nodes` has the Ray node of each worker, by rank."""
    configure(work.data)
    size = work.length.num_samples * work.prepared.info.bytes_per_sample
    if size <= held_bytes(work.data, held_share):
        return read_all(work)
    if work.prepared.info.encoding == "raw":
        return find_parts(work.prepared)
    epoch, is_begun = work.start.epoch, work.start.steps_in_epoch > 0
    whole = range(epoch + is_begun, work.length.epochs)[:2]
    return Streams(
        rest=split(work, epoch, nodes) if is_begun else None,
        full=tuple(split(work, each, nodes) for each in whole),
    )


def configure(data: Data) -> None:
    """Set the nodes on which data sets of this process run, and their share of the object store.

    Two epochs are streamed at once while one of them ends.
    """
    options = ray.data.DataContext.get_current().execution_options
    store = ray.cluster_resources()["object_store_memory"]
    options.resource_limits = ExecutionResources.for_limits(
        object_store_memory=STORE_SHARE * store / 2
    )
    options.preserve_order = not data.shuffle
    options.label_selector = data.ray_nodes


def held_bytes(data: Data, held_share: float) -> float:
    """Return the size of the data that are held in memory. Raises ConfigError if no machine has so much."""
    store = smallest_store()
    if data.memory_gib is None:
        return held_share * store
    held = data.memory_gib * 2**30
    if held > store:
        raise ConfigError(
            f"data.memory_gib = {data.memory_gib:g}, and Ray's object store has {store / 2**30:.3g} GiB on "
            "the smallest node. Lower memory_gib, or give the nodes more memory."
        )
    return held


def smallest_store() -> float:
    """Return the size of the smallest object store among the nodes with CPUs."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return min(node["object_store_memory"] for node in nodes if node.get("CPU"))


def read(work: RemainingSamples, ids: np.ndarray, seed: list[int]) -> ray.data.Dataset:
    """Return a data set of these training samples, decoded, with one block per task."""
    prepared = work.prepared
    wanted = np.zeros(prepared.num_train, bool)
    wanted[ids] = True
    tasks = tasks_of(prepared, wanted, work.world_size)
    bits = None if wanted.all() else np.packbits(wanted)

    def read_task(task: pa.Table) -> pa.Table:
        (parts,) = task["parts"].to_pylist()
        return pa.concat_tables([read_part(prepared, bits, **part) for part in parts])

    dataset = ray.data.from_blocks([pa.table({"parts": [parts]}) for parts in tasks])
    if work.config.data.shuffle:
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        dataset = dataset.randomize_block_order(seed=RandomSeedConfig(number))
    return dataset.map_batches(read_task, batch_size=None, batch_format="pyarrow")


def tasks_of(prepared: Prepared, wanted: np.ndarray, world_size: int) -> list[list[FilePart]]:
    """Return the parts of files that each task reads, for the samples whose flag is set.

    A part has about PART_BYTES. Ray Data spends 10 to 20 ms on each task, so a task reads several smaller
    files, but leaves a task for each worker. Decoding takes longer: such a task reads one file.
    """
    size = prepared.info.bytes_per_sample
    is_decoded = not any(column.is_encoded for column in prepared.info.columns.values())
    most = min(PART_BYTES, prepared.num_train * size / world_size) if is_decoded else 0
    tasks: list[list[FilePart]] = []
    filled, first = math.inf, 0
    for file, rows in zip(prepared.train.files, prepared.train.rows, strict=True):
        parts = -(-rows * size // PART_BYTES)
        if wanted[first : first + rows].any():
            for part in range(parts):
                if filled + rows * size / parts > most:
                    tasks.append([])
                    filled = 0
                tasks[-1].append({"file": file, "part": part, "parts": parts})
                filled += rows * size / parts
        first += rows
    return tasks


def split(work: RemainingSamples, epoch: int, nodes: list[str]) -> list[ray.data.DataIterator]:
    """Return a stream for each worker, of equal length, of the samples that remain from an epoch on."""
    ids = np.setdiff1d(work.unused(epoch), work.apart(epoch), assume_unique=True)
    seed = [work.config.train.seed, work.start.step, epoch]
    return read(work, ids, seed).streaming_split(work.world_size, equal=True, locality_hints=nodes)


def read_all(work: RemainingSamples) -> Arrays:
    """Read all training samples into memory. Raises RunError if Ray Data lost or repeated some."""
    samples, info = work.length.num_samples, work.prepared.info
    arrays = empty_columns(info, samples)
    times = np.zeros(samples, np.int64)
    tables: Iterable[pa.Table] = read(work, np.arange(samples), seed=[0]).iter_batches(
        batch_size=None, batch_format="pyarrow"
    )
    for table in ahead(tables, work.data.ray_nodes):
        columns = decode(table, info.decoded)
        ids = columns[ID]
        for name, array in arrays.items():
            array[ids] = columns[name]
        times[ids] += 1
    if (times != 1).any():
        raise RunError(
            f"Ray Data read {times.sum():,} samples of {work.prepared.path}, {(times > 0).sum():,} of them "
            f"different, where {samples:,} were due. Start the run again, or use data.loader: torch."
        )
    return Arrays(arrays)


def ahead(items: Iterable[T], nodes: dict[str, str] | None) -> Ahead[T]:
    """Prefetch items of Ray's tasks; `nodes` are the labels of their nodes, for an error message."""
    return Ahead(from_ray(items), CHUNKS_AHEAD, silence_s=WAIT_S, on_silence=lambda: silence(nodes))


def from_ray(items: Iterable[T]) -> Iterator[T]:
    """Iterate over items of Ray's tasks. Raises the error of a task, or RunError for an error of Ray."""
    try:
        yield from items
    except ray.exceptions.RayError as error:
        # Ray returns an error of a task as a string, traceback included.
        errors = re.escape(RunError.__module__)
        explained = re.search(rf"^{errors}\.(\w+): (.+)", str(error), re.MULTILINE)
        if explained is None:
            raise RunError(
                f"Ray Data failed: {failures.first_line(error)}\n"
                "       The log has the messages of its tasks. Start the run again, or use data.loader: "
                "torch."
            ) from error
        kind = ConfigError if explained[1] == ConfigError.__name__ else RunError
        raise kind(explained[2]) from error


def silence(nodes: dict[str, str] | None) -> RunError:
    """Return the error for a stream that has given no samples for WAIT_S seconds."""
    cpus = ray.cluster_resources().get("CPU", 0)
    free = ray.available_resources().get("CPU", 0)
    place = f" on a node with the labels {nodes} (data.ray_nodes)" if nodes else ""
    return RunError(
        f"no samples came from Ray Data for {WAIT_S:.0f} s. Its tasks need a CPU beside the workers"
        f"{place}; of {cpus:.0f} CPUs in all {free:.0f} are free. Add some, or use data.loader: torch."
    )
