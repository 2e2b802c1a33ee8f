"""A stream reads groups of rows in a fixed order, holds a bounded number of them, and resumes exactly."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import made_sources
import numpy as np
import pyarrow as pa
import pytest
import torch
from own_recipes import own_config
from pyarrow import fs, parquet
from s3_server import Bucket
from training import final_weights, open_folder, same, small_config, train_here

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.image_stream import ImageRows, ImageStream
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import stream_of
from trainyard_trainer.data.loading.stream_order import StreamOrder
from trainyard_trainer.data.loading.torch_loader import TorchBatches, ValidationBatches
from trainyard_trainer.data.sources.rows import stream_rows
from trainyard_trainer.data.sources.rows.find_rows import TableSplit, open_table
from trainyard_trainer.data.sources.rows.readers import ParquetRows
from trainyard_trainer.data.sources.rows.stream_rows import StreamRows
from trainyard_trainer.errors import ConfigError, DatasetError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained
from trainyard_trainer.storage import open_filesystem

COUNT = 60


def write_table(folder: Path, *, group: int = 5) -> Path:
    """Three files of 20 rows, in groups of 5."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, COUNT, 20):
        rows = np.arange(first, first + 20, dtype=np.int64)
        table = pa.table({"number": rows, "half": rows / 2})
        parquet.write_table(table, folder / f"part-{first:02}.parquet", row_group_size=group)
    return folder


def write_arrow(folder: Path) -> Path:
    folder.mkdir()
    table = pa.table({"number": np.arange(COUNT)})
    file = str(folder / "data.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=5)
    return folder


def write_image_parquet(folder: Path) -> Path:
    """Images that show their number, in row groups of 10."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [made_sources.png(image) for image in made_sources.pixels(COUNT)]
    labels = made_sources.labels(COUNT)
    table = pa.table(
        {"image": [{"bytes": each, "path": None} for each in pictures], "label": labels}
    )
    parquet.write_table(table, folder / "images.parquet", row_group_size=10)
    return folder


def write_tars(folder: Path) -> Path:
    """The same images in WebDataset's shards of 20."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [made_sources.png(image) for image in made_sources.pixels(COUNT)]
    for first in range(0, COUNT, 20):
        with tarfile.open(folder / f"shard-{first:02}.tar", "w") as shard:
            for number in range(first, first + 20):
                label = str(int(made_sources.labels(COUNT)[number])).encode()
                for name, data in (("png", pictures[number]), ("cls", label)):
                    entry = tarfile.TarInfo(f"{number:04}.{name}")
                    entry.size = len(data)
                    shard.addfile(entry, io.BytesIO(data))
    return folder


def stream_of_table(source: Path | str, split: str = "train", **options: Any) -> TableSplit:
    known = {"endpoint": None, "columns": None, "valid_share": 0.2, "seed": 0, "groups_at_once": 3}
    return open_table(split=split, source=str(source), **known | options)


# The order.


@pytest.mark.parametrize("batch_size", [1, 7, 8, 60])
def test_an_epoch_has_each_sample_once_and_depends_on_seed_and_epoch_alone(batch_size: int) -> None:
    order = StreamOrder(group_rows=(5, 1, 9, 20, 3, 22), groups_at_once=2, largest_bytes=0)
    epochs = [order.of_epoch(epoch, seed=1, batch_size=batch_size) for epoch in (0, 1, 0)]
    assert [sorted(each.tolist()) for each in epochs] == [[*range(60)]] * 3
    assert epochs[0].tolist() == epochs[2].tolist() != epochs[1].tolist()
    assert order.of_epoch(0, seed=2, batch_size=batch_size).tolist() != epochs[0].tolist()


def test_a_batch_mixes_the_groups_of_a_window_and_keeps_each_group_together() -> None:
    order = StreamOrder(group_rows=(100,) * 8, groups_at_once=4, largest_bytes=0)
    batches = order.of_epoch(0, seed=0, batch_size=40).reshape(-1, 40) // 100
    assert len({*batches[:10].ravel()}) == len({*batches[10:].ravel()}) == 4
    for batch in batches:
        groups, counts = np.unique(batch, return_counts=True)
        assert len(groups) == 4
        assert counts.min() >= 8  # 10 on average
        assert (np.diff(batch) != 0).sum() == 3


# Groups of rows.


@pytest.mark.parametrize("write", [write_table, write_arrow, write_tars])
def test_whole_groups_are_for_validation_and_rows_are_those_of_the_source(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard_trainer.data.sources.rows.readers.TAR_GROUP_BYTES", 5_000)
    source = write(tmp_path / "data")
    train, valid = stream_of_table(source), stream_of_table(source, "valid")
    assert len(train) == sum(train.group_rows)
    assert len(valid) == sum(valid.group_rows) < len(train)
    assert sorted([*train.indices, *valid.indices]) == [*range(COUNT)]
    column = "number" if "number" in train.columns else "cls"
    rows = train.__getitems__([3, 0, len(train) - 1])
    expected = train.indices[[3, 0, -1]]
    if column == "cls":
        expected = made_sources.labels(COUNT)[expected]
    assert [row[column] for row in rows] == expected.tolist()


def test_no_more_groups_are_in_memory_than_stated_and_each_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, int]] = []
    load = ParquetRows.load_group

    def noted(self: ParquetRows, group: int, columns: tuple[str, ...]) -> Any:
        loaded.append((self.path, group))
        return load(self, group, columns)

    monkeypatch.setattr(ParquetRows, "load_group", noted)
    table = stream_of_table(write_table(tmp_path))
    order = StreamOrder.of_table(table, 3).of_epoch(0, seed=0, batch_size=4)
    assert isinstance(table.rows, StreamRows)
    most = 0
    for start in range(0, len(order), 4):
        table.__getitems__(order[start : start + 4].tolist())
        most = max(most, len(table.rows._loaded))
    assert most == 3
    assert len(loaded) == len({*loaded}) == len(table.group_rows)


def test_workers_read_their_parts_of_the_groups(tmp_path: Path) -> None:
    order = StreamOrder(group_rows=(64,) * 16, groups_at_once=8, largest_bytes=0)
    batches = order.of_epoch(0, seed=0, batch_size=128).reshape(-1, 128) // 64
    for rank in range(4):
        part = batches[:, rank * 32 : (rank + 1) * 32]
        assert len({*part.ravel()}) < 16 / 2


# A run of one's own recipe.

RECIPE = """
from torch import nn
from torch.nn import functional
from trainyard_trainer import Loss, Recipe

class Line(Recipe):
    def build_model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        x, y = (batch[name].float().unsqueeze(1) / 60 for name in ("number", "half"))
        return Loss(sum=functional.mse_loss(model(x), y, reduction="sum"), weight=len(batch))
"""


def table_run(storage: Path, source: Path | str, **changes: Any) -> Any:
    data = changes.pop("data", {})
    schedule = {"name": "constant"}
    config = own_config(
        storage, recipe="line:Line", global_batch_size=8, schedule=schedule, **changes
    )
    known = {"source": str(source), "stream": True, "stream_groups": 3, "drop_last": False}
    return config.model_copy(update={"data": OwnData.model_validate(known | data)})


@pytest.fixture
def line(code: Path) -> Path:
    (code / "line.py").write_text(RECIPE)
    return code


def test_a_streamed_run_that_is_cut_resumes_with_the_same_bits(line: Path, tmp_path: Path) -> None:
    source = write_table(tmp_path / "data")
    whole = table_run(tmp_path / "whole", source, epochs=3)
    train_here(whole)
    cut = table_run(tmp_path / "cut", source, epochs=3)
    train_here(cut.model_copy(update={"train": cut.train.model_copy(update={"epochs": 1})}))
    assert train_here(cut, attempt=2).resumed_from is not None
    assert same(final_weights(cut), final_weights(whole))


def numbers(batches: Iterator[Batch] | Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in batches]


def worker_of(rank: int, world_size: int) -> Worker:
    return Worker(rank=rank, world_size=world_size, device=torch.device("cpu"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_workers_sees_each_sample_once_also_after_a_resume(
    line: Path, tmp_path: Path, world_size: int
) -> None:
    config = table_run(tmp_path, write_table(tmp_path / "data"))
    data = open_data(config, open_folder(config))
    length = Length.of(config, data.num_train)

    def epoch_of(epoch: int, trained: Trained, size: int) -> list[list[int]]:
        """Return the samples of each global batch that are left."""
        parts = [
            numbers(TorchBatches(data, length, trained, worker_of(rank, size), config).epoch(epoch))
            for rank in range(size)
        ]
        return [list(chain(*batch)) for batch in zip(*parts, strict=True)]

    one = epoch_of(1, Trained(), 1)
    assert epoch_of(1, Trained(), world_size) == one
    begun = Trained(epoch=1, steps_in_epoch=2)
    assert epoch_of(1, begun, world_size) == one[2:]
    workers = [worker_of(rank, world_size) for rank in range(world_size)]
    valid = [numbers(ValidationBatches(data, worker, config)) for worker in workers]
    assert sorted(chain(*one, *chain(*valid))) == [*range(COUNT)]


def test_the_log_says_how_much_a_stream_holds(line: Path, tmp_path: Path) -> None:
    config = table_run(tmp_path, write_table(tmp_path / "data"))
    stream = stream_of(open_data(config, open_folder(config)))
    assert stream is not None
    assert "10 groups of up to 5 rows and 0.0 MiB; 3 of them" in stream.describe()


# Images.


def image_run(storage: Path, source: Path | str, **changes: Any) -> Any:
    known = {
        "data__source": str(source),
        "data__stream": True,
        "data__stream_groups": 2,
        "train__model__num_classes": len(made_sources.NAMES),
    }
    return small_config(storage, **known | changes)


@pytest.mark.parametrize("write", [write_image_parquet, write_tars])
def test_streamed_images_are_those_of_the_source(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard_trainer.data.sources.rows.readers.TAR_GROUP_BYTES", 5_000)
    config = image_run(tmp_path, write(tmp_path / "data"))
    data = open_data(config, open_folder(config))
    assert isinstance(data, ImageStream)
    assert data.info.shape == (1, 8, 8)
    rows = data.open("train").indices
    batch = ImageRows(data, "train")[np.array([4, 2, 9])]
    assert batch["label"].tolist() == made_sources.labels(COUNT)[rows[[4, 2, 9]]].tolist()
    assert (batch["image"].numpy() == made_sources.pixels(COUNT)[rows[[4, 2, 9]]]).all()


def test_a_streamed_run_of_images_resumes_with_the_same_bits(tmp_path: Path) -> None:
    source = write_image_parquet(tmp_path / "data")
    changes = {"train__global_batch_size": 8, "train__schedule": {"name": "constant"}}
    whole = image_run(tmp_path / "whole", source, train__epochs=2, **changes)
    train_here(whole)
    cut = image_run(tmp_path / "cut", source, train__epochs=2, **changes)
    train_here(image_run(tmp_path / "cut", source, train__epochs=1, **changes))
    assert train_here(cut, attempt=2).resumed_from is not None
    assert same(final_weights(cut), final_weights(whole))


def test_an_image_that_cannot_be_decoded_ends_the_run_with_its_row(tmp_path: Path) -> None:
    pictures = [made_sources.png(image) for image in made_sources.pixels(COUNT)]
    pictures[38] = b"no picture"  # behind those that are read when the stream is opened
    table = pa.table({"image": pictures, "label": made_sources.labels(COUNT)})
    (tmp_path / "data").mkdir()
    parquet.write_table(table, tmp_path / "data/images.parquet", row_group_size=40)
    config = image_run(tmp_path, tmp_path / "data", data__valid_share=0.5)
    data = open_data(config, open_folder(config))
    assert isinstance(data, ImageStream)
    split: Any = "train" if 38 in data.open("train").indices else "valid"
    rows = ImageRows(data, split)
    with pytest.raises(DatasetError, match="row 38: the image cannot be decoded"):
        rows[np.arange(len(rows))]


# From a bucket.


def test_a_table_and_images_in_a_bucket_are_streamed(tmp_path: Path, bucket: Bucket) -> None:
    filesystem, root = open_filesystem(bucket.path, bucket.endpoint)
    for name, write in (("table", write_table), ("tars", write_tars)):
        fs.copy_files(
            str(write(tmp_path / name)), f"{root}/{name}", destination_filesystem=filesystem
        )
    endpoint = {"endpoint": bucket.endpoint}
    local = stream_of_table(tmp_path / "table")
    there = stream_of_table(f"{bucket.path}/table", **endpoint)
    assert there.__getitems__([*range(9)]) == local.__getitems__([*range(9)])
    config = image_run(tmp_path, f"{bucket.path}/tars", data__endpoint=bucket.endpoint)
    data = open_data(config, open_folder(config))
    assert isinstance(data, ImageStream)
    assert len(ImageRows(data, "train")[np.arange(5)]) == 5


# Patterns of names.


def test_a_pattern_names_the_files_of_a_table(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "2024/data")
    for pattern, rows in (("2024/data/part-*.parquet", 60), ("*/data/part-?0.parquet", 60)):
        found = [stream_of_table(f"{tmp_path}/{pattern}", split) for split in ("train", "valid")]
        assert sum(map(len, found)) == rows
    (folder / "part-[x].parquet").write_bytes((folder / "part-00.parquet").read_bytes())
    assert len(stream_of_table(f"{folder}/part-[x]*", valid_share=0.5)) == 10
    with pytest.raises(ConfigError, match=r"is no table \(files: none\)"):
        stream_of_table(f"{folder}/*.csv")
    with pytest.raises(ConfigError, match="there is no"):
        stream_of_table(f"{tmp_path}/2025/*.parquet")


# What cannot be streamed.


def test_a_source_that_is_held_as_a_whole_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n2\n3\n")
    for source in (tmp_path, tmp_path / "t.csv"):
        with pytest.raises(ConfigError, match="cannot be streamed: a text file has no index"):
            stream_of_table(source)


def test_a_table_with_a_single_group_needs_names_of_splits(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="a single group of rows"):
        stream_of_table(tmp_path / "t.parquet")


def test_a_row_group_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_rows, "LARGEST_GROUP", 64)
    with pytest.raises(ConfigError, match=r"has a row group of .* Write it again with smaller"):
        stream_of_table(write_table(tmp_path))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"source": "s3://b/t.csv"}, "has no index of its rows"),
        ({"source": "/data/t.jsonl"}, "has no index of its rows"),
        ({"source": "/data/t.npz"}, "read as a whole"),
        ({"source": "s3://b/t.arrow"}, "an Arrow file in an object store"),
        ({"source": "/data/t.tar.gz"}, "a compressed file"),
        ({"dataset": "a:b"}, "stream is for a source"),
    ],
)
def test_a_run_file_with_a_source_that_cannot_be_streamed_is_refused(
    data: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        OwnData.model_validate({"stream": True, **data})


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"data__source": "digits"}, "comes with a package"),
        ({"data__source": "/x/y.csv"}, "has no index of its rows"),
        ({"data__max_bad_samples": 3}, "max_bad_samples is counted by a preparation"),
    ],
)
def test_images_that_cannot_be_streamed_are_refused(
    tmp_path: Path, data: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        image_run(tmp_path, "/data/images", **data)


def test_the_size_of_a_window_needs_a_stream() -> None:
    with pytest.raises(ValueError, match="stream_groups means nothing"):
        Data.model_validate({"source": "digits", "stream_groups": 4})
