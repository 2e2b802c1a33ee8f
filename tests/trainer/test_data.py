"""From scikit-learn's digits to the batches of each worker."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits
from training import open_folder, small_config

from trainer.data import sources
from trainer.data.parquet import Images, decode, to_table
from trainer.data.torch_loader import GlobalBatches, ParquetImages, ValidationBatches
from trainer.errors import RunError
from trainer.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(small_config(tmp_path))


@pytest.fixture
def prepared(folder: RunFolder, tmp_path: Path) -> sources.Prepared:
    return sources.prepare(small_config(tmp_path).data, folder)


def test_digits_come_back_from_parquet_as_they_went_in(
    folder: RunFolder, prepared: sources.Prepared
) -> None:
    digits = load_digits()
    seen = []
    for path in (folder.train_data, folder.valid_data):
        columns = decode(pq.read_table(path), prepared.images)
        assert columns["image"].dtype == np.uint8
        for image, label, index in zip(
            columns["image"], columns["label"], columns["id"], strict=True
        ):
            assert label == digits.target[index]
            assert np.array_equal(np.round(image[0] / 255 * 16), digits.images[index])
        seen += columns["id"].tolist()
    assert sorted(seen) == list(range(1797))
    assert prepared.images.shape == (1, 8, 8)
    assert prepared.images.classes == tuple("0123456789")


def test_data_is_written_once(
    folder: RunFolder, prepared: sources.Prepared, tmp_path: Path
) -> None:
    before = Path(folder.train_data).stat().st_mtime_ns
    assert sources.prepare(small_config(tmp_path).data, folder) == prepared
    assert Path(folder.train_data).stat().st_mtime_ns == before


def test_the_split_takes_a_fifth_of_each_class_and_leaves_none_out() -> None:
    labels = np.repeat([0, 1, 2], [50, 100, 10])
    train, valid = sources.split(labels, 0.2, seed=1)
    assert sorted([*train, *valid]) == list(range(160))
    assert np.bincount(labels[valid]).tolist() == [10, 20, 2]
    again, _ = sources.split(labels, 0.2, seed=1)
    assert np.array_equal(train, again)


def test_a_row_of_the_wrong_size_is_named() -> None:
    images = Images(source="t", shape=(1, 2, 2), classes=("a",), mean=(0.0,), spread=(1.0,))
    table = to_table(images, np.arange(3), np.zeros((3, 1, 2, 2)), np.zeros(3, np.int64))
    broken = table.set_column(1, "image", [[b"1234", b"123", b"1234"]])
    with pytest.raises(RunError, match=r"row 1 has 3 bytes where 4 are right"):
        decode(broken, images)


def test_decoding_takes_slices_and_several_chunks() -> None:
    images = Images(source="t", shape=(1, 1, 2), classes=("a",), mean=(0.0,), spread=(1.0,))
    pixels = np.arange(12, dtype=np.uint8).reshape(6, 1, 1, 2)
    table = to_table(images, np.arange(6), pixels, np.zeros(6, np.int64))
    assert np.array_equal(decode(table.slice(2, 3), images)["image"], pixels[2:5])
    parts = pa.concat_tables([table.slice(4), table.slice(0, 1)])
    assert decode(parts, images)["image"].reshape(-1).tolist() == [8, 9, 10, 11, 0, 1]
    assert decode(table.slice(0, 0), images)["image"].shape == (0, 1, 1, 2)


def epoch_of(world_size: int, *, epoch: int = 0, seed: int = 0, shuffle: bool = True) -> list[list]:
    """Global batches of 100 samples in twelves, put together from all ranks."""
    ranks = []
    for rank in range(world_size):
        batches = GlobalBatches(
            100, 12, rank=rank, world_size=world_size, shuffle=shuffle, seed=seed
        )
        batches.epoch = epoch
        ranks.append([batch.tolist() for batch in batches])
    return [list(chain.from_iterable(shares)) for shares in zip(*ranks, strict=True)]


def test_no_sample_comes_twice_in_an_epoch_and_the_rest_is_left_out() -> None:
    seen = list(chain.from_iterable(epoch_of(3)))
    assert len(seen) == len(set(seen)) == 96


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_the_order_does_not_depend_on_the_number_of_workers(world_size: int) -> None:
    assert epoch_of(world_size) == epoch_of(1)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_of(2, epoch=3, seed=5) == epoch_of(2, epoch=3, seed=5)
    assert epoch_of(2, epoch=3) != epoch_of(2, epoch=4)
    assert epoch_of(2, seed=1) != epoch_of(2, seed=2)
    assert list(chain.from_iterable(epoch_of(2, shuffle=False))) == list(range(96))


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_validation_takes_each_sample_once(
    folder: RunFolder, prepared: sources.Prepared, world_size: int
) -> None:
    dataset = ParquetImages(folder, folder.valid_data, prepared.images)
    parts = [
        ValidationBatches(dataset, batch_size=50, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    seen = np.concatenate([part.indices for part in parts])
    assert sorted(seen) == list(range(prepared.num_valid))
    assert sum(len(labels) for part in parts for _, labels in part) == prepared.num_valid
