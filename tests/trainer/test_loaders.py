"""Both loaders, by the ids of the samples they hand out: none twice and none lost, whoever goes on."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
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
from training import Group, ThreadWorker

from trainer.config import TrainerConfig
from trainer.data import ray_loader
from trainer.data.parquet import Prepared
from trainer.data.ray_loader import RayBatches, Work
from trainer.data.torch_loader import GlobalBatches, TorchBatches, ValidationBatches, decode_workers
from trainer.progress import Length, Trained
from trainer.strategy import Worker

SIZES = [(97, 12), (96, 12), (25, 24), (12, 12)]
"""Samples, and how many of them are a global batch: with and without a rest."""

CPU = torch.device("cpu")


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
        images = replace(prepared_of(tmp_path, 8).images, encoding=encoding)
        return decode_workers(config.data, config.scaling, images)

    assert processes("raw") == 0
    assert processes("encoded") == 3
    assert processes("raw", data__decode_workers=2) == 2
    assert processes("encoded", data__decode_workers=0) == 0


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

    def iter_batches(self, batch_size: int, **options: Any) -> Iterator[pa.Table]:
        order = np.random.default_rng(self.epochs).permutation(len(self.tables))
        self.epochs += 1
        table = pa.concat_tables([self.tables[index] for index in order])
        rows = len(table) // self.world_size
        part = table.slice(self.rank * rows, rows)
        for first in range(0, rows, batch_size):
            yield part.slice(first, batch_size)


class FakeDataset:
    """What our tasks read, in this process."""

    def __init__(self, work: Work, ids: np.ndarray, seed: list[int]) -> None:
        wanted = np.zeros(work.length.num_samples, bool)
        wanted[ids] = True
        self.tables = [
            ray_loader.read_part(work.prepared, np.packbits(wanted), file=file, part=part, parts=3)
            for file in work.prepared.train.files
            for part in range(3)
        ]

    def iter_batches(self, **options: Any) -> Iterator[pa.Table]:
        return iter(self.tables)

    def streaming_split(self, size: int, **options: Any) -> list[Shard]:
        return [Shard(self.tables, rank, size) for rank in range(size)]


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_loader, "read", FakeDataset)
    monkeypatch.setattr(ray_loader, "configure", lambda config: None)
    monkeypatch.setattr(ray_loader, "smallest_store", lambda: 2**30)
    monkeypatch.setattr(ray_loader, "node_here", lambda: "here")


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
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "batch_size"), SIZES)
def test_ray_uses_each_sample_once_also_when_others_go_on(
    tmp_path: Path, count: int, batch_size: int, drop_last: bool, is_held: bool
) -> None:
    prepared = prepared_of(tmp_path, count)
    config = config_of(tmp_path, batch_size, data__drop_last=drop_last)
    length = Length.of(config, count)
    make = ray_by_hand(prepared, length, config, is_held=is_held)
    for world_size in (1, 2, 3, 4):
        whole = play(make, world_size=world_size, length=length)
        for given in whole.epochs.values():
            check_shares(given, length)
            check_used(flat(given), length)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "batch_size"), SIZES[:3])
@pytest.mark.parametrize("world_sizes", [(1, 2, 3), (4, 1, 4), (3, 3, 2), (2, 4, 1)])
def test_ray_no_sample_is_lost_or_comes_twice_when_others_go_on(
    tmp_path: Path,
    count: int,
    batch_size: int,
    drop_last: bool,
    is_held: bool,
    world_sizes: tuple[int, ...],
) -> None:
    prepared = prepared_of(tmp_path, count)
    config = config_of(tmp_path, batch_size, data__drop_last=drop_last)
    length = Length.of(config, count)
    make = ray_by_hand(prepared, length, config, is_held=is_held)
    # Up to two kills in the second epoch, each group as large as it likes.
    draw = random.Random(str((count, drop_last, world_sizes)))
    choice = range(1, length.steps_per_epoch)
    kills = sorted(draw.sample(choice, min(len(choice), len(world_sizes) - 1)))
    used, start, state = [], Trained(), {}
    for world_size, stop in zip(world_sizes, [*kills, None], strict=False):
        played = play(
            make,
            world_size=world_size,
            length=length,
            start=start,
            state=state,
            until=(1, stop) if stop else None,
        )
        check_shares(
            played.epochs[1], length, range(start.steps_in_epoch, stop or length.steps_per_epoch)
        )
        used += flat(played.epochs[1])
        start, state = Trained(epoch=1, steps_in_epoch=stop or 0), played.state
    check_used(used, length)
    check_used(flat(played.epochs[2]), length)
