"""Preparing a data set: how it lies in its files, and that no kill changes it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import made_sources as made
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainyard_trainer.data import image_codec
from trainyard_trainer.data.preparation import plan
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare
from trainyard_trainer.data.prepared import METADATA_KEY, Prepared, Split, read_prepared
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem

COUNT = 600


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kB, so that small data has many."""
    monkeypatch.setattr(plan, "FILE_BYTES", (3_000, 5_000))


@pytest.fixture(scope="module")
def idx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_idx(
        tmp_path_factory.mktemp("idx"), "train", made.pixels(COUNT), made.labels(COUNT)
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Parquet files of pictures, in several row groups."""
    folder = tmp_path_factory.mktemp("table")
    images = pa.array([made.png(image) for image in made.pixels(COUNT)], pa.binary())
    marks = made.labels(COUNT)
    made.write_table(folder / "a.parquet", images[:350], marks[:350], row_group_size=64)
    made.write_table(folder / "b.parquet", images[350:], marks[350:], row_group_size=1000)
    return folder


def folder_of(path: Path) -> RunFolder:
    return RunFolder(*open_filesystem(str(path)))


def prepared_in(
    dest: Path, source: Path, context: PrepareContext | None = None, **options: Any
) -> Prepared:
    prepare(
        Options(source=str(source), **options),
        folder_of(dest),
        context or PrepareContext(threads=2),
    )
    return read_prepared(folder_of(dest), path=str(dest), endpoint=None)


def hashes(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def rows_of(prepared: Prepared, part: Split) -> dict[str, np.ndarray]:
    return decode(pq.read_table(list(part.files)), prepared.info)


def numbers_in(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Which images of the source they are."""
    return np.ascontiguousarray(columns["image"][:, 0, 0, :4]).view(">u4").ravel()


# How it lies.


def test_each_sample_lies_in_one_file_at_a_random_place(idx: Path, tmp_path: Path) -> None:
    prepared = prepared_in(tmp_path, idx)
    train, valid = (rows_of(prepared, part) for part in (prepared.train, prepared.valid))
    assert train["id"].tolist() == list(range(480))
    numbers = numbers_in(train)
    assert sorted([*numbers, *numbers_in(valid)]) == list(range(COUNT))
    # Any stretch is a fair sample of the source.
    for stretch in np.array_split(numbers, 8):
        assert abs(stretch.mean() - COUNT / 2) < COUNT / 8
    assert np.bincount(valid["label"]).tolist() == [40, 40, 40]


def test_the_seed_alone_decides_about_the_order(idx: Path, tmp_path: Path) -> None:
    first = prepared_in(tmp_path / "a", idx, PrepareContext(threads=1))
    prepared_in(tmp_path / "b", idx, PrepareContext(threads=5))
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    other = prepared_in(tmp_path / "c", idx, seed=1)
    assert not np.array_equal(
        numbers_in(rows_of(first, first.train)), numbers_in(rows_of(other, other.train))
    )


def test_files_say_what_they_are(idx: Path, tmp_path: Path) -> None:
    prepared = prepared_in(tmp_path, idx)
    known = json.loads((tmp_path / "dataset.json").read_text())
    assert len(prepared.train.files) > 5
    first_id = 0
    for file in known["splits"]["train"]["files"]:
        path = tmp_path / file["file"]
        assert path.stat().st_size == file["bytes"] < 10_000
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
        found = pq.ParquetFile(path)
        assert found.num_row_groups == 4
        header = json.loads(found.schema_arrow.metadata[METADATA_KEY])
        assert (header["shape"], header["classes"]) == ([1, 8, 8], ["0", "1", "2"])
        assert (header["file"], header["first_id"]) == (file["file"], first_id)
        first_id += file["rows"]
    assert first_id == 480
    assert known["splits"]["valid"]["class_counts"] == [40, 40, 40]


@pytest.mark.parametrize("channels", [1, 3])
def test_mean_and_spread_are_those_of_the_training_images(channels: int, tmp_path: Path) -> None:
    images = made.pixels(90, channels=channels)
    source = made.write_folder(
        tmp_path / "a", [made.png(image) for image in images], made.labels(90)
    )
    prepared = prepared_in(tmp_path / "b", source)
    seen = rows_of(prepared, prepared.train)["image"] / 255
    assert prepared.info.mean == pytest.approx(seen.mean(axis=(0, 2, 3)), rel=1e-12)
    assert prepared.info.std == pytest.approx(seen.std(axis=(0, 2, 3)), rel=1e-12)


def test_images_that_are_all_alike_can_be_normalised(tmp_path: Path) -> None:
    source = made.write_idx(
        tmp_path / "a", "train", np.zeros((30, 1, 8, 8), np.uint8), made.labels(30)
    )
    prepared = prepared_in(tmp_path / "b", source)
    assert prepared.info.mean == (0.0,)
    assert prepared.info.std[0] > 0


def photos(folder: Path, count: int = 30) -> Path:
    """JPEG of 100 x 120 without sharp edges."""
    coarse = made.pixels(count, channels=3, side=4)
    smooth = [image_codec.resize(image, 100, 120) for image in coarse]
    files = [made.png(image, "JPEG", quality=90) for image in smooth]
    return made.write_folder(folder, files, made.labels(count), "jpg")


FORMS: dict[str, tuple[dict[str, Any], tuple[int, int, int], str]] = {
    "as they are": ({}, (3, 100, 120), "encoded"),
    "a size": ({"size": 96}, (3, 96, 96), "encoded"),
    "a small size": ({"size": 32}, (3, 32, 32), "raw"),
    "grey": ({"size": 96, "channels": 1}, (1, 96, 96), "encoded"),
    "pixels": ({"encoding": "raw"}, (3, 100, 120), "raw"),
    "small pictures": ({"size": 32, "encoding": "encoded"}, (3, 32, 32), "encoded"),
    "what the model wants": ({"fallback_size": 80}, (3, 80, 80), "encoded"),
}


@pytest.mark.parametrize(("options", "shape", "encoding"), FORMS.values(), ids=FORMS.keys())
def test_pictures_are_kept_in_the_form_that_was_asked_for(
    options: dict[str, Any], shape: tuple[int, int, int], encoding: str, tmp_path: Path
) -> None:
    prepared = prepared_in(tmp_path / "b", photos(tmp_path / "a"), **options)
    assert (prepared.info.shape, prepared.info.encoding) == (shape, encoding)
    train = rows_of(prepared, prepared.train)["image"]
    assert train.shape == (24, *shape)
    assert prepared.info.mean == pytest.approx((train / 255).mean(axis=(0, 2, 3)))


def test_pictures_are_kept_byte_for_byte_unless_they_get_smaller(tmp_path: Path) -> None:
    source = photos(tmp_path / "a")
    originals = {path.read_bytes() for path in source.rglob("*.jpg")}

    def kept(dest: Path, **options: Any) -> set[bytes]:
        prepared = prepared_in(dest, source, **options)
        files = [*prepared.train.files, *prepared.valid.files]
        return set(pq.read_table(files)["image"].to_pylist())

    assert kept(tmp_path / "b") == originals
    assert kept(tmp_path / "c", size=200) == originals
    smaller = kept(tmp_path / "d", size=70)
    assert not smaller & originals
    assert max(map(len, smaller)) < min(map(len, originals))
    assert {image_codec.read_header(data).height for data in smaller} == {70}


def test_pixels_take_channels_size_and_form(idx: Path, tmp_path: Path) -> None:
    colour = prepared_in(tmp_path / "a", idx, channels=3, size=16)
    assert rows_of(colour, colour.train)["image"].shape == (480, 3, 16, 16)
    encoded = prepared_in(tmp_path / "b", idx, encoding="encoded")
    assert encoded.info.encoding == "encoded"
    assert sorted(numbers_in(rows_of(encoded, encoded.valid)))[0] < COUNT
    raw = prepared_in(tmp_path / "c", idx)
    for part in ("train", "valid"):
        left, right = (rows_of(each, getattr(each, part)) for each in (encoded, raw))
        assert np.array_equal(left["image"], right["image"])


def test_grey_of_colour_is_what_picture_libraries_make_of_it(tmp_path: Path) -> None:
    images = made.pixels(30, channels=3)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    marks = made.labels(30)
    pixels = made.write_table(tmp_path / "a.parquet", column, marks)
    files = made.write_folder(
        tmp_path / "f", [made.png(image, "BMP") for image in images], marks, "bmp"
    )
    # In the order of the folder's classes, the same rows.
    order = np.argsort(marks, kind="stable")
    made.write_table(tmp_path / "a.parquet", column.take(pa.array(order)), marks[order])
    one = prepared_in(tmp_path / "b", pixels, channels=1)
    other = prepared_in(tmp_path / "c", files, channels=1)
    left, right = (rows_of(each, each.train)["image"].astype(int) for each in (one, other))
    assert np.abs(left - right).max() <= 1


def test_a_source_larger_than_memory_gives_the_same_data_set(table: Path, tmp_path: Path) -> None:
    whole = prepared_in(tmp_path / "a", table)
    shown: list[tuple[str, int, int]] = []
    context = PrepareContext(memory_bytes=20_000, show=lambda *seen: shown.append(seen))
    spilled = prepared_in(tmp_path / "b", table, context)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert len(rows_of(spilled, spilled.train)["id"]) == whole.num_train
    assert ("reading train", 480, 480) in shown
    assert ("writing valid", 120, 120) in shown


def test_a_table_of_pixels_larger_than_memory_gives_the_same_data_set(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(made.pixels(COUNT)[:, 0])
    source = made.write_table(tmp_path / "t.parquet", column, made.labels(COUNT), row_group_size=50)
    prepared_in(tmp_path / "a", source)
    prepared_in(tmp_path / "b", source, PrepareContext(memory_bytes=10_000))
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


# What may be in the destination.


def test_the_same_command_changes_nothing(idx: Path, tmp_path: Path) -> None:
    prepared_in(tmp_path, idx)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    prepared_in(tmp_path, idx)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    # Not even the source is needed any more.
    prepared_in(tmp_path, idx)


def test_another_source_or_option_is_refused_with_the_difference(
    idx: Path, table: Path, tmp_path: Path
) -> None:
    prepared_in(tmp_path, idx)
    with pytest.raises(ConfigError, match=r"another data set(?s:.*)seed: 0 there, 3 here"):
        prepared_in(tmp_path, idx, seed=3)
    with pytest.raises(ConfigError, match=rf"source: {idx} there, {table} here"):
        prepared_in(tmp_path, table)


def test_a_folder_with_other_files_is_left_alone(idx: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="has files that are not part of a data set"):
        prepared_in(tmp_path, idx)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_destination_within_its_source_is_refused(idx: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is inside .*: its files would be read as part of the source"
    ):
        prepared_in(idx.parent / "prepared", idx.parent)


# Kills.


class Killed(Exception):
    pass


class DyingFolder(RunFolder):
    """A folder whose process ends before its n-th write."""

    writes_left = 0

    def write(self, path: str, data: bytes | str, *, is_durable: bool = True) -> None:
        if not self.writes_left:
            raise Killed
        self.writes_left -= 1
        super().write(path, data, is_durable=is_durable)


@pytest.mark.parametrize("memory_bytes", [10**9, 40_000], ids=["in memory", "spilled"])
def test_a_kill_before_any_write_costs_no_finished_file(
    memory_bytes: int, table: Path, tmp_path: Path
) -> None:
    """Each attempt gets two writes further: a file, and what is noted of it."""
    context = PrepareContext(memory_bytes=memory_bytes)
    prepared_in(tmp_path / "whole", table, context)
    dying = DyingFolder(*open_filesystem(str(tmp_path / "dest")))
    attempts = 0
    while True:
        dying.writes_left = 1 + attempts % 3
        attempts += 1
        try:
            prepare(Options(source=str(table)), dying, context)
        except Killed:
            assert not (tmp_path / "dest/dataset.json").exists()
            assert attempts < 200
            continue
        break
    assert attempts > 10
    assert hashes(tmp_path / "dest") == hashes(tmp_path / "whole")


def test_a_damaged_file_of_a_killed_attempt_is_made_again(idx: Path, tmp_path: Path) -> None:
    prepared_in(tmp_path / "whole", idx)
    dying = DyingFolder(*open_filesystem(str(tmp_path / "dest")))
    dying.writes_left = 9
    with pytest.raises(Killed):
        prepare(Options(source=str(idx)), dying, PrepareContext())
    damaged = tmp_path / "dest/train/part-00001.parquet"
    data = damaged.read_bytes()
    damaged.write_bytes(b"x" + data[1:])
    (tmp_path / "dest/train/part-00002.parquet").unlink()
    prepared_in(tmp_path / "dest", idx)
    assert hashes(tmp_path / "dest") == hashes(tmp_path / "whole")


def test_a_source_that_changed_in_between_is_prepared_again(tmp_path: Path) -> None:
    source = made.write_folder(
        tmp_path / "a", [made.png(image) for image in made.pixels(60)], made.labels(60)
    )
    dying = DyingFolder(*open_filesystem(str(tmp_path / "dest")))
    dying.writes_left = 3
    with pytest.raises(Killed):
        prepare(Options(source=str(source)), dying, PrepareContext())
    (source / "ant/one-more.png").write_bytes(made.png(made.pixels(1)[0]))
    prepared_in(tmp_path / "dest", source)
    prepared_in(tmp_path / "fresh", source)
    assert hashes(tmp_path / "dest") == hashes(tmp_path / "fresh")


def prepare_elsewhere(source: str, dest: str, memory_bytes: int) -> None:
    """What another process does."""
    plan.FILE_BYTES = (3_000, 5_000)
    prepare(
        Options(source=source), folder_of(Path(dest)), PrepareContext(memory_bytes=memory_bytes)
    )


def files_in(dest: Path) -> int:
    return sum(path.is_file() for path in dest.rglob("*"))


@pytest.mark.parametrize(
    "memory_bytes",
    [pytest.param(10**9, id="in memory", marks=pytest.mark.ci), pytest.param(30_000, id="spilled")],
)
def test_sigkill_at_random_points_leaves_the_same_bytes(memory_bytes: int, tmp_path: Path) -> None:
    count = 5 * COUNT  # in some 100 files
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(made.pixels(count)[:, 0])
    source = made.write_table(tmp_path / "t.parquet", column, made.labels(count), row_group_size=50)
    prepared_in(tmp_path / "whole", source, PrepareContext(memory_bytes=memory_bytes))
    dest = tmp_path / "dest"
    # All is imported here already: a start takes no time.
    starter = multiprocessing.get_context("fork")
    random = np.random.default_rng(memory_bytes)
    kills = 0
    while kills < 20:
        wanted = files_in(dest) + int(random.integers(1, 5))
        process = starter.Process(
            target=prepare_elsewhere, args=(str(source), str(dest), memory_bytes)
        )
        process.start()
        while process.is_alive() and files_in(dest) < wanted:
            time.sleep(0.0002)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    # On a busy machine the work may be done before we look.
    assert kills >= 3
    prepared_in(dest, source, PrepareContext(memory_bytes=memory_bytes))
    assert hashes(dest) == hashes(tmp_path / "whole")
