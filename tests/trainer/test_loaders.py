"""Both loaders, by the ids of the samples they hand out: none twice and none lost, whoever goes on."""

from __future__ import annotations

import copy
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.train.torch
import torch
from attempts import wait_for
from loaders import (
    Make,
    check_shares,
    check_used,
    config_of,
    flat,
    global_batches,
    ids_of,
    play,
    prepared_of,
)
from own_ray import own_ray
from training import Group, ThreadWorker

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading import raw_reading, ray_loader, ray_source
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.chunks import Ahead, Columns, cut, in_order, shuffled
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.loading.ray_loader import HANDED_OUT, RayBatches
from trainyard_trainer.data.loading.reading import read_part
from trainyard_trainer.data.loading.remaining import RemainingSamples
from trainyard_trainer.data.loading.rows import read_stand_in
from trainyard_trainer.data.loading.torch_loader import (
    GlobalBatches,
    TorchBatches,
    ValidationBatches,
    decode_workers,
)
from trainyard_trainer.data.prepared import (
    Prepared,
    Split,
    TokenCounts,
    TokenInfo,
    token_column,
)
from trainyard_trainer.data.stored_rows import write_token_part
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

SIZES = [(97, 12), (96, 12), (25, 24), (12, 12)]
"""Samples, and how many of them are a global batch: with and without a rest."""

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("memory_gib", "held_gib"), [(None, 0.5), (0.1, 0.1), (2.0, 2.0), (2.1, None)]
)
def test_the_ray_loader_holds_what_the_run_file_says_or_its_share(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_gib: float | None,
    held_gib: float | None,
) -> None:
    monkeypatch.setattr(ray_source, "smallest_store", lambda: 2 * 2**30)
    config = config_of(tmp_path, 12, data__loader="ray", data__memory_gib=memory_gib)
    if held_gib is None:
        with pytest.raises(
            ConfigError, match=r"memory_gib = 2.1, and .* 2 GiB on the smallest node"
        ):
            ray_source.held_bytes(config.data, 0.25)
    else:
        assert ray_source.held_bytes(config.data, 0.25) == held_gib * 2**30


def test_the_torch_loader_maps_its_files_and_holds_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_gib means nothing to loader: torch"):
        config_of(tmp_path, 12, data__memory_gib=1.0)


# The torch loader.


def torch_loader(prepared: Prepared, length: Length, config: TrainerConfig) -> Make:
    return lambda start, state, worker: TorchBatches(prepared, length, start, worker, config)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "batch_size"), SIZES)
def test_torch_every_number_of_workers_learns_from_the_same_batches(
    tmp_path: Path, count: int, batch_size: int, drop_last: bool
) -> None:
    prepared = prepared_of(tmp_path, count)
    config = config_of(tmp_path, batch_size, data__drop_last=drop_last)
    length = Length.of(config, count)
    make = torch_loader(prepared, length, config)
    alone = play(make, world_size=1, length=length)
    for world_size in (2, 3, 4):
        group = play(make, world_size=world_size, length=length)
        for epoch, given in group.epochs.items():
            check_shares(given, length)
            check_used(flat(given), length)
            assert global_batches(given) == alone.epochs[epoch][0]


def test_torch_an_epoch_goes_on_where_it_stopped_with_any_number_of_workers(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, 97)
    config = config_of(tmp_path, 12, data__drop_last=False)
    length = Length.of(config, 97)
    make = torch_loader(prepared, length, config)
    whole = play(make, world_size=1, length=length)
    for steps in (1, 5, 8):
        start = Trained(epoch=1, steps_in_epoch=steps)
        rest = play(make, world_size=3, length=length, start=start)
        check_shares(rest.epochs[1], length, range(steps, length.steps_per_epoch))
        assert global_batches(rest.epochs[1]) == whole.epochs[1][0][steps:]
        assert global_batches(rest.epochs[2]) == whole.epochs[2][0]


def test_the_order_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    length = Length.of(config_of(tmp_path, 12), 100)

    def order(epoch: int, seed: int = 0, *, shuffle: bool = True) -> list[int]:
        batches = GlobalBatches(length, Worker(device=CPU), shuffle=shuffle, seed=seed)
        batches.epoch = epoch
        return np.concatenate(list(batches)).tolist()

    assert order(3) == order(3)
    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
    assert order(0, shuffle=False) == order(1, shuffle=False) == list(range(96))


def test_torch_pictures_come_as_pixels_whoever_decodes_them(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, 50, encoding="encoded")
    given = []
    for processes in (0, 2):
        config = config_of(tmp_path, 8, data__decode_workers=processes)
        length = Length.of(config, 50)
        start = Trained(epoch=1, steps_in_epoch=2)
        batches = TorchBatches(prepared, length, start, Worker(device=CPU), config)
        # The processes stay from one epoch to the next.
        given.append([ids_of(batches.epoch(epoch)) for epoch in (1, 2)])
    assert given[0] == given[1]
    assert [len(epoch) for epoch in given[0]] == [4, 6]


def test_processes_decode_beside_a_worker_where_there_is_something_to_decode(
    tmp_path: Path,
) -> None:
    def processes(encoding: str, **changes: Any) -> int:
        config = config_of(tmp_path, 8, scaling__cpus_per_worker=4, **changes)
        images = replace(prepared_of(tmp_path, 8).info, encoding=encoding)
        return decode_workers(config.data, config.scaling, images)

    assert processes("raw") == 0
    assert processes("encoded") == 3
    assert processes("raw", data__decode_workers=2) == 2
    assert processes("encoded", data__decode_workers=0) == 0


WORKER = """
import os, signal, sys
from pathlib import Path
import test_loaders as loaders
from multiprocessing import active_children

folder = Path(sys.argv[1])
config = loaders.config_of(folder, 8, data__decode_workers=2)
batches = loaders.TorchBatches(
    loaders.prepared_of(folder, 50, encoding="encoded"),
    loaders.Length.of(config, 50),
    loaders.Trained(),
    loaders.Worker(device=loaders.CPU),
    config,
)
epoch = batches.epoch(0)
next(epoch)
print(*(child.pid for child in active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ci
def test_processes_that_decode_end_when_their_worker_is_killed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": here},
        text=True,
        check=False,
        timeout=100,  # a process that does not end keeps the pipe open
    )
    assert done.returncode == -signal.SIGKILL
    decoders = [int(each) for each in done.stdout.split()]
    assert len(decoders) == 2
    assert wait_for(lambda: not any(Path(f"/proc/{each}").exists() for each in decoders), 10)


def test_beginning_an_epoch_draws_no_random_number_of_the_models(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8)
    prepared = prepared_of(tmp_path, 50)
    length = Length.of(config, 50)
    batches = TorchBatches(prepared, length, Trained(), Worker(device=CPU), config)
    before = torch.get_rng_state()
    next(iter(batches.epoch(0)))
    assert torch.equal(torch.get_rng_state(), before)


# Validation.


@pytest.mark.parametrize("encoding", ["raw", "encoded"])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_validation_takes_each_sample_once(tmp_path: Path, world_size: int, encoding: str) -> None:
    prepared = prepared_of(tmp_path, 53, encoding=encoding)
    config = config_of(tmp_path, 14, train__micro_batch_size=1)

    def validate(worker: Worker) -> list[list[int]]:
        return ids_of(ValidationBatches(prepared, worker, config))

    given = Group(world_size).run(validate)
    assert sorted(flat(given)) == list(range(53))
    assert {len(batch) for batches in given for batch in batches[:-1]} == {2}


# The Ray loader, with a stream that Ray does not make.


class Shard:
    """As Ray's stream: other rows in another order in each epoch, and as many for each worker."""

    def __init__(self, tables: list[pa.Table], rank: int, world_size: int) -> None:
        self.tables = tables
        self.rank = rank
        self.world_size = world_size
        self.epochs = 0

    def iter_batches(self, **options: Any) -> Iterator[pa.Table]:
        order = np.random.default_rng(self.epochs).permutation(len(self.tables))
        self.epochs += 1
        table = pa.concat_tables([self.tables[index] for index in order])
        rows = len(table) // self.world_size
        part = table.slice(self.rank * rows, rows)
        for first in range(0, rows, 17):
            yield part.slice(first, 17)


class FakeDataset:
    """What our tasks read, in this process."""

    def __init__(self, work: RemainingSamples, ids: np.ndarray, seed: list[int]) -> None:
        wanted = np.zeros(work.length.num_samples, bool)
        wanted[ids] = True
        self.tables = [
            read_part(work.prepared, np.packbits(wanted), file=file, part=part, parts=3)
            for file in work.prepared.train.files
            for part in range(3)
        ]

    def iter_batches(self, **options: Any) -> Iterator[pa.Table]:
        return iter(self.tables)

    def streaming_split(self, size: int, **options: Any) -> list[Shard]:
        return [Shard(self.tables, rank, size) for rank in range(size)]


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_source, "read", FakeDataset)
    monkeypatch.setattr(ray_source, "configure", lambda config: None)
    monkeypatch.setattr(ray_source, "smallest_store", lambda: 2**30)
    monkeypatch.setattr(ray_loader, "node_here", lambda: "here")
    # Several chunks, parts and windows of each epoch, several samples that wait.
    monkeypatch.setattr(ray_loader, "CHUNK_BYTES", 7 * 64)
    monkeypatch.setattr(ray_loader, "SHUFFLE_BYTES", 20 * 64)
    monkeypatch.setattr(raw_reading, "WINDOW_BYTES", 20 * 64)
    monkeypatch.setattr(raw_reading, "PART_BYTES", 7 * 64)


def ray_by_hand(
    prepared: Prepared, length: Length, config: TrainerConfig, *, is_held: bool = False
) -> Make:
    def make(start: Trained, state: dict[str, torch.Tensor], worker: ThreadWorker) -> RayBatches:
        return RayBatches(
            *(prepared, length, start, state, worker, config),
            # As it does on its way to another process, a stream becomes one of that worker's own.
            share=lambda opened: copy.deepcopy(worker.from_rank_zero(opened)),
            held_share=float(is_held),
        )

    return make


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("source", ["held", "raw", "encoded"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "batch_size"), SIZES)
def test_ray_uses_each_sample_once_with_any_number_of_workers(
    tmp_path: Path, count: int, batch_size: int, drop_last: bool, source: str, shuffle: bool
) -> None:
    prepared = prepared_of(tmp_path, count, encoding="encoded" if source == "encoded" else "raw")
    config = config_of(tmp_path, batch_size, data__drop_last=drop_last, data__shuffle=shuffle)
    length = Length.of(config, count)
    make = ray_by_hand(prepared, length, config, is_held=source == "held")
    for world_size in (1, 2, 3, 4):
        whole = play(make, world_size=world_size, length=length)
        for given in whole.epochs.values():
            check_shares(given, length)
            check_used(flat(given), length)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("source", ["held", "raw", "encoded", "held and raw in turn"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "batch_size"), SIZES[:3])
@pytest.mark.parametrize("world_sizes", [(1, 2, 3), (4, 1, 4), (3, 3, 2), (2, 4, 1)])
def test_ray_no_sample_is_lost_or_comes_twice_when_others_go_on(
    tmp_path: Path,
    count: int,
    batch_size: int,
    drop_last: bool,
    source: str,
    world_sizes: tuple[int, ...],
) -> None:
    prepared = prepared_of(tmp_path, count, encoding="encoded" if source == "encoded" else "raw")
    config = config_of(tmp_path, batch_size, data__drop_last=drop_last)
    length = Length.of(config, count)
    # Up to two kills in the second epoch; each time another group goes on.
    draw = random.Random(str((count, drop_last, world_sizes)))
    choice = range(1, length.steps_per_epoch)
    kills = sorted(draw.sample(choice, min(len(choice), len(world_sizes) - 1)))
    used, start, state = [], Trained(), {}
    for world_size, stop in zip(world_sizes, [*kills, None], strict=False):
        is_held = source == "held" or ("in turn" in source and world_size % 2 == 0)
        played = play(
            ray_by_hand(prepared, length, config, is_held=is_held),
            world_size=world_size,
            length=length,
            start=start,
            state=state,
            until=(1, stop) if stop else None,
        )
        steps = range(start.steps_in_epoch, stop or length.steps_per_epoch)
        check_shares(played.epochs[1], length, steps)
        used += flat(played.epochs[1])
        start, state = Trained(epoch=1, steps_in_epoch=stop or 0), played.state
    check_used(used, length)
    check_used(flat(played.epochs[2]), length)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("shuffle", [True, False])
def test_ray_gives_the_batches_of_torch_where_the_images_fit(tmp_path: Path, shuffle: bool) -> None:
    prepared = prepared_of(tmp_path, 97)
    config = config_of(tmp_path, 12, data__drop_last=False, data__shuffle=shuffle)
    length = Length.of(config, 97)
    held = ray_by_hand(prepared, length, config, is_held=True)
    given = play(torch_loader(prepared, length, config), world_size=1, length=length).epochs
    begun = play(held, world_size=2, length=length, until=(1, 3))
    start = Trained(epoch=1, steps_in_epoch=3)
    rest = play(held, world_size=3, length=length, start=start, state=begun.state)
    assert global_batches(begun.epochs[0]) == given[0][0]
    assert global_batches(begun.epochs[1]) + global_batches(rest.epochs[1]) == given[1][0]
    assert global_batches(rest.epochs[2]) == given[2][0]


def tokens_of(folder: Path, count: int, row_tokens: int = 16) -> Prepared:
    """Rows of tokens that show their own id, in several files."""
    ids = np.arange(count, dtype=np.int32)
    tokens = ids[:, None] * row_tokens + np.arange(row_tokens, dtype=np.int32)
    flags = (tokens % 7).astype(np.uint8)
    numbers = token_column(row_tokens, vocab_size=count * row_tokens).numbers
    files = {}
    for first in range(0, count, 40):
        path, rows = folder / f"part-{first:05}.parquet", slice(first, first + 40)
        content = write_token_part({}, path.name, first, tokens[rows], flags[rows], numbers=numbers)
        path.write_bytes(content)
        files[str(path)] = len(tokens[rows])
    numbers = {field.name: 0 for field in fields(TokenCounts) if field.name != "lengths"}
    counts = TokenCounts(**numbers, lengths=())
    info = TokenInfo(
        source="test",
        row_tokens=row_tokens,
        context_length=row_tokens,
        vocab_size=count * row_tokens,
        pad_id=0,
        tokenizer="none",
        tokenizer_sha256="none",
        loss_on="all",
        packing=True,
        too_long="truncate",
        prompt_as="text",
        rows_sha256="none",
        train=counts,
        valid=counts,
    )
    split = Split(files=tuple(files), rows=tuple(files.values()))
    return Prepared(info=info, train=split, valid=split, path=str(folder), endpoint=None)


@pytest.mark.parametrize(("count", "token_bytes"), [(4096, 2), (4097, 4)])
def test_tokens_take_two_bytes_in_files_where_the_vocabulary_fits(
    tmp_path: Path, count: int, token_bytes: int
) -> None:
    data = tokens_of(tmp_path, count)
    values = pq.read_table(list(data.train.files))["tokens"]
    assert {len(value.as_py()) for value in values} == {16 * token_bytes}
    rows = LocalCopy(data, data.train)[np.arange(count)]
    assert rows["tokens"].dtype == torch.int32
    assert int(rows["tokens"].max()) == 16 * count - 1
    check_tokens(rows)
    check_tokens(read_stand_in(data))


def check_tokens(batch: Batch) -> None:
    """The tokens and flags of a batch are those of its ids."""
    tokens = batch.ids.to(torch.int32)[:, None] * 16 + torch.arange(16, dtype=torch.int32)
    assert batch["tokens"].dtype == torch.int32
    assert torch.equal(batch["tokens"], tokens)
    assert torch.equal(batch["flags"], (tokens % 7).to(torch.uint8))


def batches_of(make: Make, world_size: int, epochs: int) -> list[list[list[int]]]:
    """The ids of each batch of each worker, whose tokens must be those of the ids."""

    def work(worker: ThreadWorker) -> list[list[int]]:
        batches, given = make(Trained(), {}, worker), []
        for epoch in range(epochs):
            for batch in batches.epoch(epoch):
                check_tokens(batch)
                given.append(batch.ids.tolist())
        return given

    return Group(world_size).run(work)


@pytest.mark.usefixtures("without_ray")
def test_ray_gives_the_batches_of_tokens_of_torch(tmp_path: Path) -> None:
    prepared = tokens_of(tmp_path, 97)
    config = config_of(tmp_path, 12, data__drop_last=False, train__epochs=2)
    length = Length.of(config, 97)
    held = ray_by_hand(prepared, length, config, is_held=True)
    for world_size in (1, 2):
        torch_given = batches_of(torch_loader(prepared, length, config), world_size, 2)
        assert batches_of(held, world_size, 2) == torch_given
        # A stream has its own order, and the same samples.
        streamed = batches_of(ray_by_hand(prepared, length, config), world_size, 2)
        given = [each for batches in streamed for batch in batches for each in batch]
        assert sorted(given) == sorted([*range(97)] * 2)


@pytest.mark.ci
@pytest.mark.usefixtures("ray_here")
def test_the_ray_loader_reads_tokens_by_tasks_and_by_workers(tmp_path: Path) -> None:
    prepared = tokens_of(tmp_path, 97)
    config = config_of(tmp_path, 12, data__drop_last=False, train__epochs=1)
    length = Length.of(config, 97)
    for held_share in (0.0, 1.0):
        given = batches_of(ray_by_threads(prepared, length, config, held_share), 2, 1)
        assert sorted(each for batches in given for batch in batches for each in batch) == [
            *range(97)
        ]


@pytest.mark.usefixtures("without_ray")
def test_a_sample_that_comes_twice_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(FakeDataset):
        def __init__(self, work: RemainingSamples, ids: np.ndarray, seed: list[int]) -> None:
            super().__init__(work, ids, seed)
            self.tables[1] = self.tables[0]

    monkeypatch.setattr(ray_source, "read", Twice)
    prepared = prepared_of(tmp_path, 97, encoding="encoded")
    config = config_of(tmp_path, 12)
    length = Length.of(config, 97)
    with pytest.raises(RunError, match="a sample twice in one epoch"):
        play(ray_by_hand(prepared, length, config), world_size=1, length=length)
    with pytest.raises(RunError, match=r"97 samples of .*, \d+ of them different, where 97"):
        play(ray_by_hand(prepared, length, config, is_held=True), world_size=1, length=length)


@pytest.mark.usefixtures("without_ray")
def test_a_sample_that_comes_to_two_workers_ends_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, 12)
    make = ray_by_hand(prepared_of(tmp_path, 97), Length.of(config, 97), config)

    def use_the_same(worker: ThreadWorker) -> None:
        batches = make(Trained(), {}, worker)
        batches.used_here[[3, 10 + worker.rank]] = True
        batches.state()

    with pytest.raises(RunError, match="a sample twice in one epoch"):
        Group(2).run(use_the_same)


@pytest.mark.usefixtures("without_ray")
def test_blocks_that_are_lost_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(FakeDataset):
        def __init__(self, work: RemainingSamples, ids: np.ndarray, seed: list[int]) -> None:
            super().__init__(work, ids, seed)
            del self.tables[1]

    monkeypatch.setattr(ray_source, "read", Lost)
    prepared = prepared_of(tmp_path, 97, encoding="encoded")
    config = config_of(tmp_path, 12, data__drop_last=False)
    length = Length.of(config, 97)
    with pytest.raises(RunError, match=r"worker 0 \d+ samples less than were due in epoch 1"):
        play(ray_by_hand(prepared, length, config), world_size=1, length=length)


def test_a_task_reads_several_small_files_unless_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_source, "PART_BYTES", 2**25)

    def parts(encoding: str, world_size: int, wanted: list[int]) -> list[list[str]]:
        prepared = prepared_of(tmp_path, 97, encoding=encoding, per_file=10)
        flags = np.isin(np.arange(97), wanted)
        tasks = ray_source.tasks_of(prepared, flags, world_size)
        assert all(part["parts"] == 1 for task in tasks for part in task)
        return [[Path(part["file"]).stem[-2:] for part in task] for task in tasks]

    every = list(range(97))
    assert parts("encoded", 2, every) == [[f"{first:02}"] for first in range(0, 100, 10)]
    assert [len(task) for task in parts("raw", 1, every)] == [10]
    assert [len(task) for task in parts("raw", 3, every)] == [3, 3, 3, 1]
    # A file without samples that are due is not read.
    assert parts("raw", 1, [0, 31, 96]) == [["00", "30", "90"]]


def test_a_large_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_of(tmp_path, 97)
    monkeypatch.setattr(ray_source, "PART_BYTES", 20 * prepared.info.bytes_per_sample)
    tasks = ray_source.tasks_of(prepared, np.ones(97, bool), 1)
    assert [(part["part"], part["parts"]) for task in tasks for part in task] == [
        *((0, 2), (1, 2)),
        *((0, 2), (1, 2)),
        (0, 1),
    ]


# What the Ray loader is made of.


def columns_of(ids: list[int]) -> Columns:
    marks = np.array(ids)
    return {"image": marks.astype(np.uint8).reshape(-1, 1, 1, 1), "label": marks % 3, "id": marks}


def chunks_of(count: int, size: int) -> list[Columns]:
    return [columns_of(list(range(count))[first : first + size]) for first in range(0, count, size)]


def all_ids(batches: Iterable[Batch]) -> list[int]:
    return torch.cat([batch.ids for batch in batches]).tolist()


@pytest.mark.parametrize("size", [1, 7, 10, 100])
@pytest.mark.parametrize("room", [100, 101, 250])
def test_a_shuffle_keeps_all_samples_and_moves_them_far(size: int, room: int) -> None:
    given = all_ids(shuffled(chunks_of(200, size), room, np.random.default_rng(0), is_pinned=False))
    assert sorted(given) == list(range(200))
    moved = np.abs(np.array(given) - np.arange(200))
    assert moved.mean() > 25
    other = all_ids(shuffled(chunks_of(200, size), room, np.random.default_rng(1), is_pinned=False))
    assert other != given


def test_batches_are_cut_from_chunks_of_any_size() -> None:
    chunks = list(in_order(chunks_of(100, 7), is_pinned=False))
    sizes = [1, 7, 6, 30, 14, 42]
    batches = list(cut(chunks, sizes))
    assert [len(batch) for batch in batches] == sizes
    assert all_ids(batches) == list(range(100))


def test_what_fails_ahead_is_raised_where_it_is_waited_for() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise RunError("no more")

    made = Ahead(items(), 2)
    assert next(made) == 1
    for _ in range(2):
        with pytest.raises(RunError, match="no more"):
            next(made)


def test_silence_has_an_end() -> None:
    never = threading.Event()
    made = Ahead(iter(never.wait, None), 1, silence_s=0.01, on_silence=lambda: RunError("silence"))
    with pytest.raises(RunError, match="silence"):
        next(made)
    never.set()


def test_nobody_makes_items_for_one_who_has_left() -> None:
    left = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            left.set()

    made = Ahead(items(), 2)
    assert next(made) == 0
    del made
    assert left.wait(10)


# The Ray loader on Ray.


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray of this process, and parts of a few rows for its tasks."""
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_source, "PART_BYTES", 20 * 64)
        patch.setattr(logging.getLogger("ray.data"), "level", logging.ERROR)
        with own_ray(num_cpus=4, **environment):
            yield


def ray_by_threads(
    prepared: Prepared, length: Length, config: TrainerConfig, held_share: float = 0.0
) -> Make:
    def make(start: Trained, state: dict[str, torch.Tensor], worker: ThreadWorker) -> RayBatches:
        return RayBatches(
            *(prepared, length, start, state, worker, config),
            share=lambda opened: ray.get(worker.from_rank_zero([ray.put(opened)])[0]),
            held_share=held_share,
        )

    return make


@pytest.mark.ci
@pytest.mark.usefixtures("ray_here")
def test_ray_streams_each_sample_once_to_workers_and_to_those_who_go_on(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, 97, encoding="encoded")
    config = config_of(tmp_path, 12, data__drop_last=False, train__epochs=2)
    length = Length.of(config, 97)
    make = ray_by_threads(prepared, length, config)
    begun = play(make, world_size=3, length=length, until=(0, 5))
    start = Trained(epoch=0, steps_in_epoch=5)
    rest = play(make, world_size=2, length=length, start=start, state=begun.state)
    check_shares(rest.epochs[0], length, range(5, 9))
    check_used(flat(begun.epochs[0]) + flat(rest.epochs[0]), length)
    check_shares(rest.epochs[1], length)
    check_used(flat(rest.epochs[1]), length)


@pytest.mark.ci
@pytest.mark.usefixtures("ray_here")
def test_ray_keeps_the_order_of_the_files_unless_it_shall_shuffle(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, 97, encoding="encoded")
    config = config_of(tmp_path, 12, data__shuffle=False, train__epochs=1)
    length = Length.of(config, 97)
    given = play(ray_by_threads(prepared, length, config), world_size=1, length=length)
    assert flat(given.epochs[0]) == list(range(96))


@pytest.mark.ci
@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("held_share", [0.0, 0.25])
def test_a_picture_that_cannot_be_decoded_is_named(tmp_path: Path, held_share: float) -> None:
    prepared = prepared_of(tmp_path, 97)
    broken = replace(prepared, info=replace(prepared.info, encoding="encoded"))
    config = config_of(tmp_path, 12)
    length = Length.of(config, 97)
    make = ray_by_threads(broken, length, config, held_share)
    with pytest.raises(RunError, match=r"^sample \d+ .*cannot be decoded"):
        play(make, world_size=1, length=length)


class Hog:
    """An actor that occupies CPUs."""

    def is_there(self) -> bool:
        return True


@pytest.fixture
def no_free_cpu(ray_here: None) -> Iterator[None]:
    hog = ray.remote(Hog).options(num_cpus=4).remote()
    assert ray.get(hog.is_there.remote())
    yield
    ray.kill(hog)


@pytest.mark.ci
@pytest.mark.usefixtures("no_free_cpu")
def test_a_ray_without_a_cpu_for_data_ends_the_run_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_source, "WAIT_S", 2.0)
    prepared = prepared_of(tmp_path, 97, encoding="encoded")
    config = config_of(tmp_path, 12)
    length = Length.of(config, 97)
    with pytest.raises(RunError, match=r"no samples .* for 2 s.* of 4 CPUs in all 0 are free"):
        play(ray_by_threads(prepared, length, config), world_size=1, length=length)


def stream_here(task: dict[str, Any]) -> list[list[list[int]]]:
    """In a worker of Ray Train: the ids of each batch, of all workers."""
    context = ray.train.get_context()
    worker = Worker(rank=context.get_world_rank(), world_size=context.get_world_size(), device=CPU)
    make = (task["prepared"], task["length"], Trained(), {}, worker, task["config"])
    batches = RayBatches(*make, held_share=task["held_share"])
    given = [ids_of(batches.epoch(epoch)) for epoch in range(2)]
    # Every worker knows of all samples of the epoch.
    assert np.unpackbits(batches.state()[HANDED_OUT].numpy()).sum() == task["length"].num_samples
    return worker.gathered(given)


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(
    ("held_share", "encoding"),
    [
        pytest.param(0.0, "encoded", marks=pytest.mark.ci),
        pytest.param(0.0, "raw", marks=pytest.mark.ci),
        pytest.param(0.25, "raw", marks=pytest.mark.slow),
    ],
)
def test_ray_rank_zero_opens_the_data_for_the_workers_of_ray_train(
    tmp_path: Path, held_share: float, encoding: str
) -> None:
    prepared = prepared_of(tmp_path, 97, encoding=encoding)
    config = config_of(tmp_path, 12, data__drop_last=False, train__epochs=2)
    length = Length.of(config, 97)
    known = {"prepared": prepared, "length": length, "config": config, "held_share": held_share}
    trainer = ray.train.torch.TorchTrainer(
        stream_here,
        train_loop_config=known,
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="ids", storage_path=str(tmp_path / "train")),
    )
    given = trainer.fit().return_value
    for epoch in range(2):
        check_shares([worker[epoch] for worker in given], length)
        check_used(flat([worker[epoch] for worker in given]), length)
