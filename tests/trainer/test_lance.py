"""Data sets of Lance: one version of each is read, with the rows that are not deleted, in a fixed order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import made_sources as made
import numpy as np
import pyarrow as pa
import pytest
import torch
from own_recipes import own_config
from pyarrow import fs, parquet
from s3_server import Bucket
from test_streaming import RECIPE
from training import final_weights, open_folder, same, small_config, train_here

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.boosting.table import prepare as prepare_table
from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.config.data.section import Table
from trainyard_trainer.config.training.boosting import Boosting
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.image_stream import ImageStream
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare
from trainyard_trainer.data.prepared import Prepared, read_prepared
from trainyard_trainer.data.sources import lance_datasets
from trainyard_trainer.data.sources.chats.chat_files import ChatFiles
from trainyard_trainer.data.sources.rows.find_rows import TableSplit, open_table
from trainyard_trainer.data.sources.rows.stream_rows import StreamRows
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools.data import main

lance = pytest.importorskip("lance")

COUNT = 60
FRAGMENT = 10
PIXELS = made.pixels(COUNT)
PNGS = [made.png(image) for image in PIXELS]


def numbers_table() -> pa.Table:
    rows = np.arange(COUNT, dtype=np.int64)
    return pa.table({"number": rows, "half": rows / 2})


def image_table(image: pa.Array | None = None) -> pa.Table:
    return pa.table({"image": PNGS if image is None else image, "label": made.labels(COUNT)})


def write_lance(table: pa.Table, path: Path | str, **options: Any) -> str:
    """Write a data set with several fragments."""
    lance.write_dataset(table, str(path), max_rows_per_file=FRAGMENT, **options)
    return str(path)


def write_parquet(table: pa.Table, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=FRAGMENT)
    return str(path)


def split_of(source: Path | str, split: str = "train", **options: Any) -> TableSplit:
    known = {"endpoint": None, "columns": None, "valid_share": 0.2, "seed": 0}
    return open_table(split=split, source=str(source), **known | options)


def all_rows(source: str, **options: Any) -> list[Any]:
    """The numbers of all rows of a table, of both splits."""
    splits = [split_of(source, split, **options) for split in ("train", "valid")]
    return sorted(
        row["number"] for each in splits for row in each.__getitems__([*range(len(each))])
    )


# Tables and streams.


@pytest.mark.parametrize("groups_at_once", [None, 3], ids=["held", "streamed"])
def test_a_table_has_the_rows_of_the_same_table_in_parquet(
    groups_at_once: int | None, tmp_path: Path
) -> None:
    sources = (
        write_lance(numbers_table(), tmp_path / "t.lance"),
        write_parquet(numbers_table(), tmp_path / "t.parquet"),
    )
    for split in ("train", "valid"):
        mine, other = (split_of(each, split, groups_at_once=groups_at_once) for each in sources)
        assert (mine.columns, mine.group_rows) == (other.columns, other.group_rows)
        order = np.random.default_rng(0).permutation(len(mine)).tolist()
        assert mine.__getitems__(order) == other.__getitems__(order)


@pytest.mark.parametrize("groups_at_once", [None, 3], ids=["held", "streamed"])
def test_deleted_rows_are_left_out(groups_at_once: int | None, tmp_path: Path) -> None:
    source = write_lance(numbers_table(), tmp_path / "t.lance")
    lance.dataset(source).delete("number % 7 = 3 or (number >= 20 and number < 30)")
    kept = [each for each in range(COUNT) if each % 7 != 3 and not 20 <= each < 30]
    assert all_rows(source, groups_at_once=groups_at_once) == kept
    assert all_rows(f"{source}@1", groups_at_once=groups_at_once) == [*range(COUNT)]


def test_a_large_fragment_is_read_in_parts_that_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lance_datasets, "GROUP_BYTES", 1000)
    table = pa.table({"number": np.arange(COUNT), "data": [os.urandom(200)] * COUNT})
    source = str(tmp_path / "t.lance")
    lance.write_dataset(table, source)
    rows = split_of(source, groups_at_once=3)
    assert isinstance(rows.rows, StreamRows)
    assert len(rows.rows.group_rows) > 10
    assert rows.largest_bytes < 2 * 1000
    assert all_rows(source, groups_at_once=3) == [*range(COUNT)]


def test_numbers_that_a_file_has_packed_count_as_in_memory(tmp_path: Path) -> None:
    source = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"x": np.arange(100_000) % 3, "y": np.zeros(100_000)}), source)
    size = sum(file.stat().st_size for file in Path(source, "data").iterdir())
    table = lance_datasets.LanceTable(fs.LocalFileSystem(), lance.dataset(source), source, source)
    assert size < 800_000
    assert table.group_bytes.sum() >= 1_600_000


def test_blobs_are_read_as_bytes_and_count_with_their_sizes(tmp_path: Path) -> None:
    blob = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("number", pa.int64()), blob])
    values = [os.urandom(20_000) for _ in range(20)]
    source = write_lance(pa.table([np.arange(20), values], schema=schema), tmp_path / "t.lance")
    rows = split_of(source, groups_at_once=2, valid_share=0.5)
    assert rows.largest_bytes >= FRAGMENT * 20_000
    assert [row["blob"] for row in rows.__getitems__([0, 5])] == [
        values[rows.indices[index]] for index in (0, 5)
    ]


def test_folders_named_train_and_valid_are_the_splits(tmp_path: Path) -> None:
    for name, count in (("train", 20), ("valid", 12)):
        write_lance(numbers_table().slice(0, count), tmp_path / "db" / f"{name}.lance")
    sizes = [len(split_of(tmp_path / "db", split)) for split in ("train", "valid")]
    assert sizes == [20, 12]


def test_missing_values_are_counted_and_told_with_their_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"x": [1, None, 3], "s": ["a", "b", None]})
    source = write_lance(table, tmp_path / "t.lance")
    assert main(["inspect", source, "--table", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["splits"]) == ("Lance", {"all": {"rows": 3, "files": 1}})
    assert [column["missing"] for column in found["columns"]] == [1, 1]
    assert "column x has no value in row 1" in found["refused"]


# Versions.


def table_run(storage: Path, source: str, **changes: Any) -> Any:
    config = own_config(
        storage,
        recipe="line:Line",
        global_batch_size=8,
        schedule={"name": "constant"},
        **changes,
    )
    data = {"source": source, "stream": True, "stream_groups": 3, "drop_last": False}
    return config.model_copy(update={"data": OwnData.model_validate(data)})


@pytest.fixture
def line(code: Path) -> Path:
    (code / "line.py").write_text(RECIPE)
    return code


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_number_of_workers_sees_the_samples_of_parquet_also_after_a_resume(
    line: Path, tmp_path: Path, world_size: int
) -> None:
    def batches_of(source: str, trained: Trained, size: int) -> list[list[int]]:
        config = table_run(tmp_path, source)
        data = open_data(config, open_folder(config))
        length = Length.of(config, data.num_train)
        parts = []
        for rank in range(size):
            worker = Worker(rank=rank, world_size=size, device=torch.device("cpu"))
            epoch = TorchBatches(data, length, trained, worker, config).epoch(1)
            parts.append([batch["number"].tolist() for batch in epoch])
        return [list(chain(*batch)) for batch in zip(*parts, strict=True)]

    expected = batches_of(write_parquet(numbers_table(), tmp_path / "t.parquet"), Trained(), 1)
    source = write_lance(numbers_table(), tmp_path / "t.lance")
    assert batches_of(source, Trained(), world_size) == expected
    begun = Trained(epoch=1, steps_in_epoch=2)
    assert batches_of(source, begun, world_size) == expected[2:]


@pytest.mark.ci
def test_a_version_that_is_written_meanwhile_does_not_change_a_run(
    line: Path, tmp_path: Path
) -> None:
    source = write_lance(numbers_table(), tmp_path / "t.lance")
    whole = table_run(tmp_path / "whole", source, epochs=2)
    train_here(whole)
    cut = table_run(tmp_path / "cut", source, epochs=2)
    train_here(cut.model_copy(update={"train": cut.train.model_copy(update={"epochs": 1})}))
    write_lance(numbers_table(), source, mode="append")
    lance.dataset(source).delete("number < 30")
    assert train_here(cut, attempt=2).resumed_from is not None
    assert same(final_weights(cut), final_weights(whole))
    known = json.loads((tmp_path / "cut/own/data-versions.json").read_text())
    assert known[source]["number"] == 1


def test_a_version_that_was_removed_or_written_anew_is_refused(line: Path, tmp_path: Path) -> None:
    source = write_lance(numbers_table(), tmp_path / "t.lance")
    config = table_run(tmp_path, source)
    open_data(config, open_folder(config))
    write_lance(numbers_table(), source, mode="overwrite")
    lance.dataset(source).cleanup_old_versions(timedelta(0))
    with pytest.raises(ConfigError, match=r"has no version 1: it was removed.*or --fresh"):
        open_data(config, open_folder(config))
    shutil.rmtree(source)
    write_lance(numbers_table(), source)
    with pytest.raises(ConfigError, match=r"version 1 of .* other files than when the run began"):
        open_data(config, open_folder(config))


def test_a_tag_names_a_version(tmp_path: Path) -> None:
    source = write_lance(numbers_table(), tmp_path / "t.lance")
    lance.dataset(source).tags.create("gold", 1)
    lance.dataset(source).delete("number >= 10")
    assert len(all_rows(f"{source}@gold")) == COUNT
    assert len(all_rows(source)) == 10
    with pytest.raises(ConfigError, match="has no version silver"):
        split_of(f"{source}@silver")


# Images.


def image_run(storage: Path, source: str, **changes: Any) -> Any:
    known = {
        "data__source": source,
        "data__stream": True,
        "data__stream_groups": 2,
        "train__model__num_classes": len(made.NAMES),
        "train__global_batch_size": 8,
        "train__schedule": {"name": "constant"},
    }
    return small_config(storage, **known | changes)


def prepared_from(source: str, dest: Path, **options: Any) -> Prepared:
    folder = RunFolder(*open_filesystem(str(dest)))
    prepare(Options(source=source, **options), folder, PrepareContext(threads=2))
    return read_prepared(folder, path=str(dest), endpoint=None)


def columns_of(prepared: Prepared) -> list[dict[str, np.ndarray]]:
    return [
        decode(parquet.read_table(list(split.files)), prepared.info)
        for split in (prepared.train, prepared.valid)
    ]


IMAGES: dict[str, Callable[[], pa.Array]] = {
    "image files": lambda: pa.array(PNGS),
    "structs": lambda: pa.array([{"bytes": each, "path": None} for each in PNGS]),
    "raw bytes": lambda: pa.array([image.tobytes() for image in PIXELS], pa.binary()),
    "tensors": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(PIXELS[:, 0]),
    "lists": lambda: pa.array(PIXELS.reshape(COUNT, -1).tolist(), pa.list_(pa.uint8())),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_are_prepared_as_those_of_parquet(kind: str, tmp_path: Path) -> None:
    table = image_table(IMAGES[kind]())
    mine = prepared_from(write_lance(table, tmp_path / "t.lance"), tmp_path / "mine")
    other = prepared_from(write_parquet(table, tmp_path / "t.parquet"), tmp_path / "other")
    for found, expected in zip(columns_of(mine), columns_of(other), strict=True):
        assert all((found[name] == expected[name]).all() for name in expected)


def test_images_are_inspected_without_their_deleted_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lance(image_table(), tmp_path / "t.lance")
    lance.dataset(source).delete("label = 1")
    assert main(["inspect", source, "--json"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["splits"]["all"]["class_counts"] == [20, 0, 20]
    assert found["kind"] == "data sets of Lance with pictures"
    assert "version 2 of the data set is read" in output.out + output.err


def test_a_preparation_that_was_killed_begins_again_with_a_new_version(tmp_path: Path) -> None:
    source = write_lance(image_table(), tmp_path / "t.lance")
    folder = RunFolder(*open_filesystem(str(tmp_path / "dest")))

    class Killed(Exception):
        pass

    def die(stage: str, done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        prepare(Options(source=source), folder, PrepareContext(threads=2, show=die))
    lance.dataset(source).delete("label = 2")
    said: list[str] = []
    prepare(Options(source=source), folder, PrepareContext(threads=2, say=said.append))
    found = read_prepared(folder, path=str(tmp_path / "dest"), endpoint=None)
    assert found.num_train + found.num_valid == 40
    whole = prepared_from(source, tmp_path / "whole")
    for mine, expected in zip(columns_of(found), columns_of(whole), strict=True):
        assert (mine["image"] == expected["image"]).all()


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from test_lance import stored_often
from training import train_here
from trainyard_trainer.data.image_stream import ImageRows

read, batches = ImageRows.__getitem__, []

def dying(self, indices):
    batches.append(self.split)
    if batches.count("train") == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, indices)

ImageRows.__getitem__ = dying
train_here(stored_often(Path(sys.argv[1]), sys.argv[2]))
"""


def stored_often(storage: Path, source: str) -> Any:
    """A run of 3 epochs of 6 steps, with a checkpoint every 2 steps."""
    return image_run(storage, source, train__epochs=3, checkpoint__every_samples=16)


@pytest.mark.slow
@pytest.mark.ci
def test_a_stream_of_images_that_is_killed_goes_on_with_the_bits_of_parquet(tmp_path: Path) -> None:
    source = write_lance(image_table(), tmp_path / "t.lance")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path / "cut"), source],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    write_lance(image_table(), source, mode="overwrite")
    cut = stored_often(tmp_path / "cut", source)
    newest = Checkpoints(open_folder(cut)).newest()
    assert newest is not None
    assert newest.trained.steps_in_epoch > 0
    assert train_here(cut, attempt=2).resumed_from == newest.name
    whole = stored_often(tmp_path / "whole", write_parquet(image_table(), tmp_path / "t.parquet"))
    train_here(whole)
    assert same(final_weights(cut), final_weights(whole))


# Chats.


def test_chats_are_read_with_the_numbers_of_their_rows(tmp_path: Path) -> None:
    rows = pa.table({"prompt": [f"p{i}" for i in range(25)], "completion": ["c"] * 25})
    source = write_lance(rows, tmp_path / "t.lance")
    files = ChatFiles.open(source, None)
    stamp = files.stamp()
    lance.dataset(source).delete("prompt = 'p3'")
    found = [*files.rows(None)]
    assert [each.row["prompt"] for each in found] == [f"p{i}" for i in range(25)]
    assert str(found[24].location) == f"{source}, row 25"
    newer = ChatFiles.open(source, None)
    assert newer.stamp() != stamp
    assert len(newer.table()) == 24


# From a bucket.


def test_a_data_set_in_a_bucket_is_streamed_and_prepared(tmp_path: Path, bucket: Bucket) -> None:
    write_lance(image_table(), tmp_path / "t.lance")
    filesystem, root = open_filesystem(bucket.path, bucket.endpoint)
    fs.copy_files(str(tmp_path / "t.lance"), f"{root}/t.lance", destination_filesystem=filesystem)
    source = f"{bucket.path}/t.lance"
    mine = split_of(source, endpoint=bucket.endpoint, groups_at_once=3)
    local = split_of(tmp_path / "t.lance", groups_at_once=3)
    assert mine.__getitems__([*range(20)]) == local.__getitems__([*range(20)])
    assert [*mine.versions] == [source]
    folder = RunFolder(*open_filesystem(str(tmp_path / "dest")))
    prepare(Options(source=source), folder, PrepareContext(endpoint=bucket.endpoint))
    found = read_prepared(folder, path=str(tmp_path / "dest"), endpoint=None)
    assert found.num_train + found.num_valid == COUNT
    config = image_run(tmp_path, source, data__endpoint=bucket.endpoint)
    assert isinstance(open_data(config, open_folder(config)), ImageStream)


# What cannot be read.


def damage(path: str, change: Callable[[bytes], bytes], folder: str = "data") -> None:
    file = next(Path(path, folder).glob("*.lance" if folder == "data" else "*.manifest"))
    file.write_bytes(change(file.read_bytes()))


def test_damaged_and_missing_files_are_told(tmp_path: Path) -> None:
    def damaged(name: str, change: Callable[[bytes], bytes], folder: str = "data") -> str:
        source = write_lance(numbers_table(), tmp_path / f"{name}.lance")
        damage(source, change, folder)
        return source

    cut = damaged("cut", lambda data: data[:100])
    empty = damaged("empty", lambda data: b"", "_versions")
    for source in (cut, empty):
        with pytest.raises(ConfigError, match=f"{source} is no intact data set of Lance"):
            all_rows(source, groups_at_once=3)
    gone = write_lance(numbers_table(), tmp_path / "gone.lance")
    next(Path(gone, "data").iterdir()).unlink()
    with pytest.raises(ConfigError, match=r"is missing, a file of the version.*cleanup_old"):
        all_rows(gone, groups_at_once=3)
    shutil.rmtree(Path(gone, "_versions"))
    with pytest.raises(ConfigError, match="is no data set of Lance, which is a folder with"):
        split_of(gone)


def test_what_is_no_data_set_of_lance_is_told(tmp_path: Path) -> None:
    source = write_lance(image_table(), tmp_path / "t.lance")
    with pytest.raises(ConfigError, match=r"has no column lable.*Did you mean label"):
        prepared_from(source, tmp_path / "dest", label_column="lable")
    with pytest.raises(ConfigError, match="has no column nummer, but image, label"):
        split_of(source, columns=["nummer"])
    with pytest.raises(ConfigError, match="column label is of type int64, where bytes"):
        prepared_from(source, tmp_path / "dest", image_column="label", label_column="label")
    with pytest.raises(ConfigError, match="column image is of type double, where bytes"):
        prepared_from(
            write_lance(image_table(pa.array([0.5] * COUNT)), tmp_path / "f.lance"),
            tmp_path / "dest",
        )
    with pytest.raises(ConfigError, match="there is no"):
        split_of(tmp_path / "none.lance@2")
    shutil.copytree(source, tmp_path / "unnamed")
    with pytest.raises(ConfigError, match=r"whose name does not end in \.lance"):
        split_of(tmp_path / "unnamed")
    empty = str(tmp_path / "e.lance")
    lance.write_dataset(numbers_table().schema.empty_table(), empty)
    with pytest.raises(ConfigError, match="has no rows"):
        split_of(empty, groups_at_once=3)
    table = Table.model_validate({"source": source})
    with pytest.raises(ConfigError, match=r"gradient_boosting reads Parquet alone.*"):
        prepare_table(table, Boosting.model_validate(BOOSTING), None, print)


BOOSTING = {
    "recipe": "gradient_boosting",
    "library": "xgboost",
    "objective": "regression",
    "rounds": 1,
}


def test_a_storage_that_cannot_be_reached_is_worth_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lance(numbers_table(), tmp_path / "t.lance")

    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError(
            "LanceError(IO): Generic S3 error: Error performing GET: error sending request"
        )

    monkeypatch.setattr(lance, "dataset", fail)
    with pytest.raises(RunError, match=r"cannot be read: .*Check that the storage"):
        split_of(source)


def test_without_the_package_the_command_to_install_it_is_told(tmp_path: Path) -> None:
    source = write_lance(numbers_table(), tmp_path / "t.lance")
    with pytest.MonkeyPatch.context() as missing:
        missing.setitem(sys.modules, "lance", None)
        with pytest.raises(ConfigError, match=r"pip install 'trainyard\[lance\]'"):
            split_of(source)


def test_other_sources_do_not_import_the_package(tmp_path: Path) -> None:
    source = write_parquet(numbers_table(), tmp_path / "t.parquet")
    program = (
        "import sys\n"
        "from trainyard_trainer.data.sources.rows.find_rows import open_table\n"
        f"open_table(split='train', source={source!r}, endpoint=None, columns=None, "
        "valid_share=0.2, seed=0)\n"
        "print('lance' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
