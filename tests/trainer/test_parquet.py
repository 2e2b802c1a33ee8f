"""What lies in the files of a prepared data set comes back as arrays."""

from __future__ import annotations

import json
from pathlib import Path

import made_sources as made
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainyard_trainer.data import image_codec
from trainyard_trainer.data.prepared import FORMAT, DatasetInfo, read_prepared
from trainyard_trainer.data.stored_rows import decode, header_of, to_table, write_part
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem


def images_of(shape: tuple[int, int, int], encoding: str = "raw") -> DatasetInfo:
    return DatasetInfo(
        source="t", shape=shape, encoding=encoding, classes=("a",), mean=(0.0,), std=(1.0,)
    )


def test_a_row_of_the_wrong_size_is_named() -> None:
    images = images_of((1, 2, 2))
    table = to_table(images, np.arange(3), np.zeros((3, 1, 2, 2)), np.zeros(3, np.int64))
    broken = table.set_column(1, "image", [[b"1234", b"123", b"1234"]])
    with pytest.raises(RunError, match=r"sample 1 has 3 bytes where 4 are right"):
        decode(broken, images)


def test_decoding_takes_slices_and_several_chunks() -> None:
    images = images_of((1, 1, 2))
    pixels = np.arange(12, dtype=np.uint8).reshape(6, 1, 1, 2)
    table = to_table(images, np.arange(6), pixels, np.zeros(6, np.int64))
    assert np.array_equal(decode(table.slice(2, 3), images)["image"], pixels[2:5])
    parts = pa.concat_tables([table.slice(4), table.slice(0, 1)])
    assert decode(parts, images)["image"].reshape(-1).tolist() == [8, 9, 10, 11, 0, 1]
    assert decode(table.slice(0, 0), images)["image"].shape == (0, 1, 1, 2)


def encoded_part(path: Path, files: list[bytes]) -> Path:
    header = header_of("t", (3, 8, 8), "encoded", ("a",))
    marks = np.zeros(len(files), np.int64)
    path.write_bytes(write_part(header, "train/p.parquet", 100, pa.array(files), marks))
    return path


@pytest.mark.parametrize("threads", [1, 2, 7, None])
def test_pictures_are_decoded_in_order_by_any_number_of_threads(
    threads: int | None, tmp_path: Path
) -> None:
    pixels = made.pixels(20, channels=3)
    file = encoded_part(tmp_path / "p.parquet", [made.png(image) for image in pixels])
    images = images_of((3, 8, 8), "encoded")
    columns = decode(pq.read_table(file), images, threads=threads)
    assert np.array_equal(columns["image"], pixels)
    assert columns["id"].tolist() == list(range(100, 120))
    none = decode(pq.read_table(file).slice(0, 0), images, threads=threads)
    assert none["image"].shape == (0, 3, 8, 8)


def test_a_picture_that_cannot_be_decoded_is_named_with_its_file_and_row(tmp_path: Path) -> None:
    files = [made.png(image) for image in made.pixels(6, channels=3)]
    files[4] = files[4][:50]
    table = pq.read_table(encoded_part(tmp_path / "p.parquet", files))
    images = images_of((3, 8, 8), "encoded")
    where = r"sample 104 \(train/p.parquet, row 4\) of t cannot be decoded: "
    with pytest.raises(RunError, match=where):
        decode(table, images)
    with pytest.raises(RunError, match=where):
        decode(table.slice(3, 2), images, threads=1)
    # Of a table with another file's header nobody claims to know the file.
    with pytest.raises(RunError, match=r"sample 4 of t cannot be decoded"):
        decode(table.set_column(0, "id", pa.array(range(6))), images)


def test_pictures_of_other_sizes_are_brought_to_the_shape(tmp_path: Path) -> None:
    wide = np.zeros((3, 8, 24), np.uint8)
    wide[:, :, 8:16] = 200
    files = [made.png(wide), made.png(wide.transpose(0, 2, 1))]
    table = pq.read_table(encoded_part(tmp_path / "p.parquet", files))
    columns = decode(table, images_of((3, 8, 8), "encoded"))
    assert (columns["image"] == 200).all()


def test_several_row_groups_are_in_every_file(tmp_path: Path) -> None:
    files = [made.png(image) for image in made.pixels(9, channels=3)]
    found = pq.ParquetFile(encoded_part(tmp_path / "p.parquet", files))
    assert found.num_row_groups == 3
    assert image_codec.decode(found.read()["image"][8].as_py(), (3, 8, 8)).shape == (3, 8, 8)


# dataset.json.


def known_of(tmp_path: Path, **changes: object) -> RunFolder:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/p.parquet").write_bytes(b"12345")
    part = {"files": [{"file": "train/p.parquet", "rows": 1, "bytes": 5, "sha256": ""}]}
    known = {
        "format": FORMAT,
        "images": {
            "source": "t", "shape": [1, 2, 2], "encoding": "raw", "classes": ["a"],
            "mean": [0.0], "std": [1.0],
        },
        "splits": {"train": part, "valid": {"files": []}},
        "bad_samples": [],
    }  # fmt: skip
    (tmp_path / "dataset.json").write_text(json.dumps(known | changes))
    return RunFolder(*open_filesystem(str(tmp_path)))


def test_a_data_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    prepared = read_prepared(known_of(tmp_path), path="there", endpoint=None)
    assert prepared.info == images_of((1, 2, 2))
    assert prepared.train.files == (f"{tmp_path}/train/p.parquet",)
    assert (prepared.num_train, prepared.num_valid, prepared.path) == (1, 0, "there")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "train/p.parquet").unlink(), r"p.parquet is missing, where"),
        (
            lambda root: (root / "train/p.parquet").write_bytes(b"1"),
            r"p.parquet has 1 bytes, where",
        ),
        (
            lambda root: (root / "dataset.json").write_text("{}"),
            r"was not written by `trainyard data",
        ),
        (
            lambda root: (root / "dataset.json").write_text("{"),
            r"was not written by `trainyard data",
        ),
        (
            lambda root: (root / "dataset.json").write_text('{"format": 99}'),
            rf"has format 99, and this version reads {FORMAT}",
        ),
    ],
    ids=["a file is missing", "a file is short", "another JSON", "half of it", "another format"],
)
def test_a_damaged_data_set_is_refused(damage: object, message: str, tmp_path: Path) -> None:
    folder = known_of(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_prepared(folder, path=str(tmp_path), endpoint=None)
