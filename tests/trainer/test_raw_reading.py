"""Raw samples that a worker of the Ray loader streams by itself: their order, their memory, their errors."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from loaders import Given, check_used, config_of, flat, play, prepared_of
from pyarrow import fs
from s3_server import Bucket
from training import ThreadWorker

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading import raw_reading
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.raw_reading import (
    SampleWindows,
    find_parts,
    readers_for,
    share_of_epoch,
)
from trainyard_trainer.data.loading.ray_loader import Streamed
from trainyard_trainer.data.loading.remaining import RemainingSamples
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

COUNT = 97
"""Samples, in files of 40, whose row groups have 10 samples or fewer."""


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 20 samples, and a part for each row group."""
    monkeypatch.setattr(raw_reading, "WINDOW_BYTES", 20 * 64)
    monkeypatch.setattr(raw_reading, "PART_BYTES", 64)


class OwnBatches(Streamed):
    """Batches without their state: the samples that a resumed epoch has used are given."""

    def state(self) -> dict[str, torch.Tensor]:
        return {}


def remaining(
    prepared: Prepared,
    config: TrainerConfig,
    world_size: int,
    start: Trained | None = None,
    used: tuple[int, ...] = (),
) -> RemainingSamples:
    flags = np.isin(np.arange(prepared.num_train), used)
    length = Length.of(config, prepared.num_train)
    return RemainingSamples(prepared, length, start or Trained(), flags, world_size, config)


def given(
    prepared: Prepared,
    config: TrainerConfig,
    world_size: int,
    start: Trained | None = None,
    used: tuple[int, ...] = (),
) -> dict[int, Given]:
    """The ids that each worker is given, by epoch."""
    work = remaining(prepared, config, world_size, start, used)

    def make(start: Trained, state: dict[str, torch.Tensor], worker: ThreadWorker) -> OwnBatches:
        windows = SampleWindows(find_parts(prepared), work, worker.rank, is_pinned=False)
        return OwnBatches(windows, work, worker)

    return play(make, world_size=world_size, length=work.length, start=start).epochs


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_seed_gives_the_same_batches(tmp_path: Path, world_size: int) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    config = config_of(tmp_path, 12, data__drop_last=False)
    first = given(prepared, config, world_size)
    assert given(prepared, config, world_size) == first
    other = config_of(tmp_path, 12, data__drop_last=False, train__seed=1)
    assert given(prepared, other, world_size)[0] != first[0]


def test_each_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    epochs = given(prepared_of(tmp_path, COUNT), config_of(tmp_path, 12), 2)
    orders = {tuple(flat(epoch)) for epoch in epochs.values()}
    assert len(orders) == 3
    # Each epoch divides the files among the workers anew.
    assert len({frozenset(flat(epoch[:1])) for epoch in epochs.values()}) == 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_after_a_resume_is_that_of_a_run_without_a_stop(
    tmp_path: Path, world_size: int
) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    config = config_of(tmp_path, 12, data__drop_last=False)
    whole = given(prepared, config, world_size)
    used = tuple(range(0, 60))
    start = Trained(epoch=1, steps_in_epoch=5)
    resumed = given(prepared, config, world_size, start, used)
    assert sorted(flat(resumed[1])) == list(range(60, COUNT))
    assert resumed[2] == whole[2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_shuffling_each_worker_reads_a_stretch_in_the_order_of_the_files(
    tmp_path: Path, world_size: int
) -> None:
    config = config_of(tmp_path, 12, data__shuffle=False)
    epochs = given(prepared_of(tmp_path, COUNT), config, world_size)
    for epoch in epochs.values():
        assert [sample for worker in epoch for sample in flat([worker])] == list(range(96))


def test_samples_move_far_and_mix_with_those_of_other_row_groups(tmp_path: Path) -> None:
    config = config_of(tmp_path, 10)
    batches = given(prepared_of(tmp_path, 400, per_file=40), config, 1)[0][0]
    moved = np.abs(np.concatenate(batches) - np.arange(400))
    assert moved.mean() > 100
    groups = [len({sample // 10 for sample in batch}) for batch in batches]
    assert np.mean(groups) > 1.8


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_workers_share_a_part_by_its_rows(tmp_path: Path, world_size: int) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    work = remaining(prepared, config_of(tmp_path, 12, data__drop_last=False), world_size)
    parts = find_parts(prepared).parts
    shares = [list(share_of_epoch(parts, work, 0, rank)) for rank in range(world_size)]
    for share, following in pairwise(shares):
        (part, rows), (next_part, next_rows) = share[-1], following[0]
        assert part == next_part
        assert rows[-1] + 1 == next_rows[0]
    samples = [part.first + row for share in shares for part, rows in share for row in rows]
    assert sorted([*samples, *work.apart(0)]) == list(range(COUNT))


@pytest.mark.parametrize(
    ("samples_at_once", "rows"),
    [
        (1, [10] * 8 + [5, 5, 5, 2]),
        (9, [10] * 8 + [5, 5, 7]),
        (20, [20, 20, 20, 20, 17]),
        (1_000, [40, 40, 17]),
    ],
)
def test_neighbouring_row_groups_are_read_at_once_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples_at_once: int, rows: list[int]
) -> None:
    monkeypatch.setattr(raw_reading, "PART_BYTES", samples_at_once * 64)
    parts = find_parts(prepared_of(tmp_path, COUNT)).parts
    assert [part.rows for part in parts] == rows
    assert [part.first for part in parts] == np.cumsum([0, *rows])[:-1].tolist()


def test_two_windows_are_in_memory_and_no_more_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def note(*args: object) -> None:
        read.append(len(args[4]))
        read_into(*args)

    read_into = raw_reading.read_into
    monkeypatch.setattr(raw_reading, "read_into", note)
    prepared = prepared_of(tmp_path, 400)
    work = remaining(prepared, config_of(tmp_path, 10, train__epochs=2), 1)
    windows = SampleWindows(find_parts(prepared), work, 0, is_pinned=False)
    memory = set()
    for number, window in enumerate(windows, start=1):
        memory.add(id(window.columns["image"]))
        assert len(window) == len(window.columns["image"]) == 20
        assert sum(read) <= (number + 1) * 20
    assert len(memory) == 2
    assert sum(read) == 800


def test_a_row_group_larger_than_a_window_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_reading, "WINDOW_BYTES", 1)
    prepared = prepared_of(tmp_path, COUNT)
    config = config_of(tmp_path, 12)
    for epoch in given(prepared, config, 2).values():
        check_used(flat(epoch), Length.of(config, COUNT))


def first_batch(prepared: Prepared, folder: Path) -> Batch:
    work = remaining(prepared, config_of(folder, 12, data__shuffle=False), 1)
    windows = SampleWindows(find_parts(prepared), work, 0, is_pinned=False)
    return next(windows).rows(0, 1)


def break_footer(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def break_values(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 200 + content[204:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_footer, "is no intact Parquet file"),
        (break_values, "cannot be read: .* page header failed"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    damage(Path(prepared.train.files[0]))
    with pytest.raises((ConfigError, RunError), match=rf"(?s)part-00000.parquet {message}"):
        first_batch(prepared, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    Path(prepared.train.files[1]).unlink()
    with pytest.raises(ConfigError, match=r"part-00040.parquet cannot be read: .*No such file"):
        first_batch(prepared, tmp_path)


def test_a_file_that_goes_away_in_training_is_named(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    work = remaining(prepared, config_of(tmp_path, 12), 1)
    windows = SampleWindows(find_parts(prepared), work, 0, is_pinned=False)
    for file in prepared.train.files:
        Path(file).unlink()
    with pytest.raises(ConfigError, match=r"part-\d+.parquet cannot be read: .*No such file"):
        list(windows)


def test_a_file_with_other_samples_than_dataset_json_says_is_named(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, COUNT)
    file = prepared.train.files[1]
    table = pq.read_table(file)
    pq.write_table(table.take(list(range(39, -1, -1))), file)
    with pytest.raises(RunError, match=r"the ids of .*part-00040.parquet are not 40, 41 and so on"):
        given(prepared, config_of(tmp_path, 12), 1)
    pq.write_table(table.slice(1), file)
    with pytest.raises(RunError, match=r"part-00040.parquet has 39 samples where .* counts 40"):
        first_batch(prepared, tmp_path)


@pytest.fixture
def in_bucket(bucket: Bucket, tmp_path: Path) -> Prepared:
    """A prepared data set in a bucket."""
    local = prepared_of(tmp_path, COUNT)
    path = f"{bucket.path}/{uuid.uuid4().hex}"
    prepared = replace(local, path=path, endpoint=bucket.endpoint)
    store, root = prepared.open_filesystem(), path.removeprefix("s3://")
    files = []
    for file in local.train.files:
        files.append(f"{root}/{Path(file).name}")
        with store.open_output_stream(files[-1]) as stream:
            stream.write(Path(file).read_bytes())
    split = replace(local.train, files=tuple(files))
    return replace(prepared, train=split, valid=split)


@pytest.mark.ci
def test_workers_read_from_a_bucket(in_bucket: Prepared, tmp_path: Path) -> None:
    config = config_of(tmp_path, 12, data__drop_last=False)
    epochs = given(in_bucket, config, 2)
    assert epochs == given(prepared_of(tmp_path, COUNT), config, 2)
    for epoch in epochs.values():
        check_used(flat(epoch), Length.of(config, COUNT))


@pytest.mark.ci
def test_an_object_that_is_missing_in_a_bucket_is_named(
    in_bucket: Prepared, tmp_path: Path
) -> None:
    gone = in_bucket.train.files[2]
    in_bucket.open_filesystem().delete_file(gone)
    with pytest.raises((ConfigError, RunError), match=rf"{gone} cannot be read"):
        first_batch(in_bucket, tmp_path)


def test_a_bucket_is_read_by_several_threads_and_a_disk_by_as_many_as_torch_has() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert readers_for(fs.LocalFileSystem()) == 1
        torch.set_num_threads(2)
        assert readers_for(fs.LocalFileSystem()) == 2
    finally:
        torch.set_num_threads(threads)
    assert readers_for(fs.S3FileSystem(anonymous=True, region="x")) == raw_reading.READERS
