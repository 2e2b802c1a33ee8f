"""Data sets of every kind become the same prepared one; what is wrong with them is said with its place."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_sources as made
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits
from training import open_folder, small_config

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.preparation import run_data
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare
from trainyard_trainer.data.preparation.splits import split
from trainyard_trainer.data.prepared import Prepared, Split, read_prepared
from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.images.find import open_source
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.image_classification.recipe import Classification
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem

COUNT = 30
PIXELS = made.pixels(COUNT)
LABELS = made.labels(COUNT)
PNGS = [made.png(image) for image in PIXELS]
NAMED = [made.NAMES[label] for label in LABELS]


def prepared_from(
    source: Path | str, dest: Path, *, context: PrepareContext | None = None, **options: Any
) -> Prepared:
    folder = RunFolder(*open_filesystem(str(dest)))
    prepare(Options(source=str(source), **options), folder, context or PrepareContext(threads=2))
    return read_prepared(folder, path=str(dest), endpoint=None)


def rows_of(prepared: Prepared, part: Split) -> dict[str, np.ndarray]:
    return decode(pq.read_table(list(part.files)), prepared.info)


def all_rows(prepared: Prepared) -> dict[int, tuple[np.ndarray, int]]:
    """Image and label by the number that the image shows."""
    found = {}
    for part in (prepared.train, prepared.valid):
        columns = rows_of(prepared, part)
        assert columns["id"].tolist() == list(range(part.count))
        for image, label in zip(columns["image"], columns["label"].tolist(), strict=True):
            found[int.from_bytes(image[0, 0, :4].tobytes(), "big")] = (image, label)
    return found


def listed(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.array(values.tolist(), kind)


def ray_tensors(images: np.ndarray) -> pa.Array:
    from ray.data.extensions import ArrowTensorArray

    return ArrowTensorArray.from_numpy(images)


def raw_bytes() -> list[bytes]:
    return [image.tobytes() for image in PIXELS]


def huggingface(path: Path) -> Path:
    """Pictures in {bytes, path}, and the names of the labels in the schema's metadata."""
    structs = [{"bytes": image, "path": f"{i}.png"} for i, image in enumerate(PNGS)]
    table = pa.table({"image": structs, "label": LABELS})
    features = {"label": {"names": list(made.NAMES), "_type": "ClassLabel"}}
    note = json.dumps({"info": {"features": features}})
    path.parent.mkdir(parents=True)
    pq.write_table(table.replace_schema_metadata({"huggingface": note}), path)
    return path.parent


def table(image: Callable[[], Any], marks: Any = LABELS) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        made.write_table(folder / "a.parquet", image(), marks, row_group_size=7)
        return folder

    return write


def manifest(name: str, marks: Any = LABELS) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        made.write_folder(folder / "pictures", PNGS, LABELS)
        paths = [f"pictures/{made.NAMES[label]}/{i:06}.png" for i, label in enumerate(LABELS)]
        records = [
            {"label": mark, "image": path}
            for path, mark in zip(paths, np.array(marks).tolist(), strict=True)
        ]
        return made.write_manifest(folder / name, records)

    return write


def idx_folder(folder: Path) -> Path:
    made.write_idx(folder, "train", PIXELS, LABELS)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "idx files": idx_folder,
    "a packed idx file": lambda folder: made.write_idx(
        folder, "train", PIXELS, LABELS, is_packed=True
    ),
    "a folder of pictures": lambda folder: made.write_folder(folder, PNGS, LABELS),
    "a CSV with numbers": manifest("all.csv"),
    "a CSV with names": manifest("all.csv", NAMED),
    "a TSV": manifest("all.tsv"),
    "a JSONL with numbers": manifest("all.jsonl"),
    "a JSONL with names": manifest("all.jsonl", NAMED),
    "pictures in Parquet": table(lambda: pa.array(PNGS, pa.binary())),
    "large binary, names": table(lambda: pa.array(PNGS, pa.large_binary()), NAMED),
    "names as categories": table(
        lambda: pa.array(PNGS, pa.binary()), pa.array(NAMED).dictionary_encode()
    ),
    "Hugging Face's structs": lambda folder: huggingface(folder / "x" / "data.parquet"),
    "raw bytes": table(lambda: pa.array(raw_bytes(), pa.binary())),
    "raw bytes of one length": table(lambda: pa.array(raw_bytes(), pa.binary(64))),
    "lists": table(lambda: listed(PIXELS.reshape(COUNT, -1), pa.list_(pa.uint8()))),
    "nested lists": table(lambda: listed(PIXELS[:, 0], pa.list_(pa.list_(pa.uint8())))),
    "nested lists of large numbers": table(
        lambda: listed(PIXELS, pa.list_(pa.large_list(pa.list_(pa.int64()))))
    ),
    "nested lists of one length": table(
        lambda: listed(PIXELS[:, 0], pa.list_(pa.list_(pa.uint8(), 8), 8))
    ),
    "tensors": table(lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(PIXELS[:, 0])),
    "Ray's tensors": table(lambda: ray_tensors(PIXELS[:, 0])),
}


@pytest.mark.parametrize("write", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_source_keeps_all_images_and_labels(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    prepared = prepared_from(write(tmp_path / "source"), tmp_path / "dest")
    assert (prepared.num_train, prepared.num_valid) == (24, 6)
    assert prepared.info.shape == (1, 8, 8)
    assert prepared.info.encoding == "raw"
    assert prepared.info.classes in (made.NAMES, ("0", "1", "2"))
    found = all_rows(prepared)
    assert sorted(found) == list(range(COUNT))
    for number, (image, label) in found.items():
        assert np.array_equal(image, PIXELS[number])
        assert label == LABELS[number]


def test_ray_tensors_are_read_where_ray_is_not(tmp_path: Path) -> None:
    """A type that nobody has registered is a list, with a note beside it."""
    note = {
        b"ARROW:extension:name": b"ray.data.arrow_tensor_v9",
        b"ARROW:extension:metadata": b"[8, 8]",
    }
    field = pa.field("image", pa.large_list(pa.uint8()), metadata=note)
    images = listed(PIXELS.reshape(COUNT, -1), field.type)
    schema = pa.schema([field, ("label", pa.int64())])
    pq.write_table(pa.table([images, LABELS], schema=schema), tmp_path / "a.parquet")
    prepared = prepared_from(tmp_path / "a.parquet", tmp_path / "dest")
    assert sorted(all_rows(prepared)) == list(range(COUNT))
    assert prepared.info.shape == (1, 8, 8)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_colour_lies_in_either_order(last: bool, tmp_path: Path) -> None:
    colour = made.pixels(COUNT, channels=3)
    stored = np.ascontiguousarray(colour.transpose(0, 2, 3, 1)) if last else colour
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(stored)
    source = made.write_table(tmp_path / "a.parquet", column, LABELS)
    prepared = prepared_from(source, tmp_path / "dest")
    assert prepared.info.shape == (3, 8, 8)
    found = all_rows(prepared)
    assert all(np.array_equal(image, colour[number]) for number, (image, _) in found.items())


# Parts for training and validation.


def two_folders(folder: Path, valid: str) -> Path:
    made.write_folder(folder / "train", PNGS[:24], LABELS[:24])
    made.write_folder(folder / valid, PNGS[24:], LABELS[24:])
    return folder


def two_idx(folder: Path) -> Path:
    made.write_idx(folder, "train", PIXELS[:24], LABELS[:24])
    made.write_idx(folder, "t10k", PIXELS[24:], LABELS[24:], is_packed=True)
    return folder


def two_tables(folder: Path) -> Path:
    images = pa.array(PNGS, pa.binary())
    made.write_table(folder / "data/train-00000-of-00002.parquet", images[:10], LABELS[:10])
    made.write_table(folder / "data/train-00001-of-00002.parquet", images[10:24], LABELS[10:24])
    made.write_table(folder / "data/test-00000-of-00001.parquet", images[24:], LABELS[24:])
    return folder


def with_split_column(folder: Path) -> Path:
    records = [
        {
            "image": f"{made.NAMES[label]}/{i:06}.png",
            "label": label,
            "split": "train" if i < 24 else "val",
        }
        for i, label in enumerate(LABELS.tolist())
    ]
    made.write_folder(folder, PNGS, LABELS)
    return made.write_manifest(folder / "all.jsonl", records)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: two_folders(folder, "val"),
        lambda folder: two_folders(folder, "Test"),
        two_idx,
        two_tables,
        with_split_column,
    ],
    ids=["train and val", "train and Test", "idx", "tables", "a split column"],
)
def test_a_source_with_parts_is_not_split_again(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    prepared = prepared_from(write(tmp_path / "source"), tmp_path / "dest")
    valid = rows_of(prepared, prepared.valid)["image"]
    assert prepared.num_train == 24
    assert sorted(image[0, 0, 3] for image in valid) == list(range(24, 30))


def test_validation_may_come_from_another_source(tmp_path: Path) -> None:
    source = made.write_folder(tmp_path / "a", PNGS[:24], LABELS[:24])
    valid = made.write_idx(tmp_path / "b", "t10k", PIXELS[24:], LABELS[24:])
    with pytest.raises(ConfigError, match="labels are names in train, numbers in valid"):
        prepared_from(source, tmp_path / "dest", valid_source=str(valid))
    valid = made.write_folder(tmp_path / "c", PNGS[24:], LABELS[24:])
    prepared = prepared_from(source, tmp_path / "dest", valid_source=str(valid))
    assert (prepared.num_train, prepared.num_valid) == (24, 6)


def test_parts_that_nobody_asked_for_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    source = two_folders(tmp_path / "source", "valid")
    made.write_folder(source / "test", PNGS[:3], LABELS[:3])
    (source / "train/ant/notes.txt").write_text("none")
    prepared_from(source, tmp_path / "dest", context=PrepareContext(say=said.append))
    assert any("test is left out; validation is on valid" in line for line in said)
    assert any("files whose names are not those of pictures: 1" in line for line in said)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    """It has pictures of its own, and no classes below it."""
    source = made.write_folder(tmp_path / "a", PNGS, LABELS)
    (source / "bee").rename(source / "train")
    prepared = prepared_from(source, tmp_path / "dest")
    assert prepared.info.classes == ("ant", "cat", "train")


def test_other_folders_beside_train_are_no_classes(tmp_path: Path) -> None:
    said: list[str] = []
    source = two_folders(tmp_path / "a", "valid")
    (source / "notes").mkdir()
    prepared = prepared_from(source, tmp_path / "dest", context=PrepareContext(say=said.append))
    assert prepared.info.classes == made.NAMES
    assert any("left out beside train, valid: notes" in line for line in said)


def test_the_split_takes_a_fifth_of_each_class_and_leaves_none_out() -> None:
    marks = np.repeat([0, 1, 2], [50, 100, 10])
    train, valid = split(marks, 0.2, seed=1)
    assert sorted([*train, *valid]) == list(range(160))
    assert np.bincount(marks[valid]).tolist() == [10, 20, 2]
    again, _ = split(marks, 0.2, seed=1)
    assert np.array_equal(train, again)


# A run's own data.


def open_data(folder: RunFolder, model: Model | None = None, **data: Any) -> Prepared:
    return run_data.open_data(
        Data(**data),
        folder,
        form=Classification(
            model or Model(name="resnet18", in_channels=1, num_classes=10)
        ).prepare_options(),
        storage_endpoint=None,
        say=lambda line: None,
    )


def test_digits_come_back_from_parquet_as_they_went_in(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    prepared = open_data(folder, source="digits")
    digits = load_digits()
    for part, rows in zip(
        (prepared.train, prepared.valid), split(digits.target, 0.2, 0), strict=True
    ):
        columns = rows_of(prepared, part)
        assert columns["image"].dtype == np.uint8
        assert np.array_equal(columns["label"], digits.target[rows])
        assert np.array_equal(np.round(columns["image"][:, 0] / 255 * 16), digits.images[rows])
        assert columns["id"].tolist() == list(range(len(rows)))
    assert prepared.info.shape == (1, 8, 8)
    assert prepared.info.classes == tuple("0123456789")
    seen = rows_of(prepared, prepared.train)["image"] / 255
    assert prepared.info.mean == pytest.approx((seen.mean(),), rel=1e-12)
    assert prepared.info.std == pytest.approx((seen.std(),), rel=1e-12)


def test_data_is_written_once(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    prepared = open_data(folder, source="digits")
    before = Path(prepared.train.files[0]).stat().st_mtime_ns
    assert open_data(folder, source="digits") == prepared
    assert Path(prepared.train.files[0]).stat().st_mtime_ns == before


def test_a_run_takes_prepared_data_where_it_is(tmp_path: Path) -> None:
    prepared = prepared_from("digits", tmp_path / "dest")
    folder = open_folder(small_config(tmp_path))
    assert open_data(folder, source=prepared.path) == prepared
    assert folder.files() == []
    with pytest.raises(ConfigError, match="which is a prepared data set"):
        open_data(folder, source=prepared.path, valid_source="./other")


def test_a_run_brings_pictures_to_its_models_size_and_channels(tmp_path: Path) -> None:
    large = made.pixels(COUNT, channels=3, side=100)
    source = made.write_folder(tmp_path / "a", [made.png(image) for image in large], LABELS)
    model = Model(name="resnet18", in_channels=1, num_classes=3, image_size=80)
    prepared = open_data(open_folder(small_config(tmp_path)), model, source=str(source))
    assert prepared.info.shape == (1, 80, 80)
    assert prepared.info.encoding == "encoded"
    assert rows_of(prepared, prepared.valid)["image"].shape == (6, 1, 80, 80)


def test_a_run_keeps_small_images_as_they_are(tmp_path: Path) -> None:
    model = Model(name="resnet18", in_channels=3, num_classes=3, image_size=32)
    source = made.write_folder(tmp_path / "a", PNGS, LABELS)
    prepared = open_data(open_folder(small_config(tmp_path)), model, source=str(source))
    assert prepared.info.shape == (3, 8, 8)


def test_numbers_may_name_fewer_classes_than_the_model_has(tmp_path: Path) -> None:
    source = made.write_idx(tmp_path, "train", PIXELS, LABELS)
    prepared = open_data(open_folder(small_config(tmp_path)), source=str(source))
    assert len(prepared.info.classes) == 10


# What is wrong.


def broken_folder(folder: Path) -> Path:
    images = list(PNGS)
    images[4] = images[4][:40]
    return made.write_folder(folder, images, LABELS)


def without_file(folder: Path) -> Path:
    source = manifest("all.csv")(folder)
    (folder / "pictures/cat/000005.png").unlink()
    return source


def with_text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir()
        (folder / name).write_text(text)
        return folder / name

    return write


def with_bad_line(folder: Path) -> Path:
    source = manifest("all.jsonl")(folder)
    source.write_text(source.read_text() + "{image: no}\n[1]\n")
    return source


def with_wrong_label(mark: Any) -> Callable[[Path], Path]:
    marks = LABELS.tolist()
    marks[7] = mark
    return table(lambda: pa.array(PNGS, pa.binary()), marks)


def other_shape(folder: Path) -> Path:
    """The second of so many pictures is not among those that are looked at first."""
    images = [made.png(image) for image in made.pixels(210)]
    images[3] = made.png(made.pixels(1, side=9)[0])
    return made.write_folder(folder, images, made.labels(210))


def other_length(folder: Path) -> Path:
    values = raw_bytes()
    values[3] = values[3][:-1]
    return table(lambda: pa.array(values, pa.binary()))(folder)


def ragged(folder: Path) -> Path:
    rows = PIXELS[:, 0].tolist()
    rows[3][2] = rows[3][2][:-1]
    rows[4] = None
    rows[5][0] = None
    return table(lambda: pa.array(rows, pa.list_(pa.list_(pa.uint8()))))(folder)


def out_of_range(folder: Path) -> Path:
    rows = PIXELS.reshape(COUNT, -1).astype(int)
    rows[2, 3] = 256
    return table(lambda: listed(rows, pa.list_(pa.int32())))(folder)


def new_class(folder: Path) -> Path:
    source = two_folders(folder, "valid")
    (source / "valid/cat").rename(source / "valid/dog")
    return source


BAD_SAMPLES: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "a broken picture": (broken_folder, 1, r"bee/000004.png: it cannot be decoded: "),
    "a missing file": (
        without_file,
        1,
        r"all.csv, line 7: pictures/cat/000005.png: there is no such",
    ),
    "a line that is no JSON": (with_bad_line, 2, r"all.jsonl, line 31: it is no JSON: "),
    "a negative label": (
        with_wrong_label(-1),
        1,
        r"a.parquet, row 7: its label -1 is out of range",
    ),
    "a huge label": (with_wrong_label(2**40), 1, r"row 7: its label 1099511627776 is out of range"),
    "no label": (with_wrong_label(None), 1, r"a.parquet, row 7: it has no label"),
    "another shape": (other_shape, 1, r"ant/000003.png: it is 9 x 9, where others are 8 x 8"),
    "another length": (other_length, 1, r"a.parquet, row 3: it has not 64 values"),
    "ragged lists": (
        ragged,
        3,
        r"a.parquet, row 3: it has not 8 x 8 values",
    ),
    "a pixel of 256": (out_of_range, 1, r"row 2: it has pixels that are not from 0 to 255"),
    "a class of validation alone": (
        new_class,
        2,
        r"its label 'dog' is not a class of the training",
    ),
}


@pytest.mark.parametrize(
    ("write", "count", "message"), BAD_SAMPLES.values(), ids=BAD_SAMPLES.keys()
)
def test_a_bad_sample_is_named_or_left_out_and_counted(
    write: Callable[[Path], Path], count: int, message: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "source")
    with pytest.raises(ConfigError, match=f"samples that cannot be used: (?s:.*){message}"):
        prepared_from(source, tmp_path / "dest", context=PrepareContext(max_bad_samples=count - 1))
    prepared = prepared_from(
        source, tmp_path / "dest", context=PrepareContext(max_bad_samples=count)
    )
    assert prepared.bad_samples == count
    known = json.loads((tmp_path / "dest/dataset.json").read_text())
    assert len(known["bad_samples"]) == count
    assert all(bad["file"] and bad["reason"] for bad in known["bad_samples"])
    for part in (prepared.train, prepared.valid):
        assert rows_of(prepared, part)["id"].tolist() == list(range(part.count))


def truncated_idx(folder: Path) -> Path:
    path = made.write_idx(folder, "train", PIXELS, LABELS)
    images = folder / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    return path.parent


def truncated_gz(folder: Path) -> Path:
    path = made.write_idx(folder, "train", PIXELS, LABELS, is_packed=True)
    images = folder / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-100])
    return path.parent


def swapped_idx(folder: Path) -> Path:
    made.write_idx(folder, "train", PIXELS, LABELS)
    marks = (folder / "train-labels-idx1-ubyte").read_bytes()
    (folder / "train-images-idx3-ubyte").write_bytes(marks)
    return folder


def no_gz(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"\0\0\x08\x03")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\0"))
    return folder


def bomb_gz(folder: Path) -> Path:
    """Half a gigabyte of zeros behind a header of three small images."""
    path = made.write_idx(folder, "train", PIXELS[:3], LABELS[:3], is_packed=True)
    begin = gzip.decompress(path.read_bytes())[:16]
    packer = zlib.compressobj(wbits=31)
    zeros = bytes(2**24)
    with path.open("wb") as file:
        file.write(packer.compress(begin))
        for _ in range(32):
            file.write(packer.compress(zeros))
        file.write(packer.flush())
    return folder


def boasting_idx(folder: Path) -> Path:
    path = made.write_idx(folder, "train", PIXELS[:3], LABELS[:3])
    path.write_bytes(np.array([0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1], ">u4").tobytes())
    return folder


def fewer_labels(folder: Path) -> Path:
    made.write_idx(folder, "train", PIXELS, LABELS)
    made.write_idx(folder / "other", "train", PIXELS[:5], LABELS[:5])
    (folder / "other/train-labels-idx1-ubyte").rename(folder / "train-labels-idx1-ubyte")
    return folder / "train-images-idx3-ubyte"


def lonely_idx(folder: Path) -> Path:
    made.write_idx(folder, "train", PIXELS, LABELS)
    (folder / "train-labels-idx1-ubyte").unlink()
    return folder


def empty_class(folder: Path) -> Path:
    source = made.write_folder(folder, PNGS, LABELS)
    (source / "dog").mkdir()
    return source


def unknown_folder(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "c.json"):
        (folder / name).write_text("")
    return folder


def half_table(folder: Path) -> Path:
    source = table(lambda: pa.array(PNGS, pa.binary()))(folder)
    file = folder / "a.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    return source


def two_types(folder: Path) -> Path:
    made.write_table(folder / "a.parquet", pa.array(PNGS, pa.binary()), LABELS)
    made.write_table(folder / "b.parquet", pa.array(PNGS, pa.binary()), NAMED)
    return folder


def several_shapes(folder: Path) -> Path:
    images = [made.png(made.pixels(1, side=side)[0]) for side in range(70, 70 + COUNT)]
    return made.write_folder(folder, images, LABELS)


WRONG: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "a truncated idx file": (
        truncated_idx,
        {},
        r"images-idx3-ubyte has 1,935 bytes, where 30 x 8 x 8",
    ),
    "a truncated gz": (truncated_gz, {}, r"images-idx3-ubyte.gz cannot be decompressed"),
    "a bomb": (bomb_gz, {}, r"has more than 208 bytes, where 3 x 8 x 8 values make 208"),
    "sizes that cannot be": (boasting_idx, {}, r"has 16 bytes, where 4294967295 x 4294967295"),
    "no gz": (no_gz, {}, r"images-idx3-ubyte.gz cannot be decompressed"),
    "the wrong magic": (swapped_idx, {}, r"begins with 0x00000801, where an idx file of images"),
    "fewer labels": (fewer_labels, {}, r"has 30 images, and .*-labels-idx1-ubyte has 5 labels"),
    "no labels": (lonely_idx, {}, r"has no labels: neither train-labels-idx1-ubyte nor"),
    "an empty class": (empty_class, {}, r"dog has no picture: each sub-folder is a class"),
    "an unknown folder": (
        unknown_folder,
        {},
        r"folders: 1, files: 3 \(.txt 2, .json 1\), and is no data set(?s:.*)A data set of images is",
    ),
    "nothing": (lambda folder: folder, {}, r"there is no .*/source"),
    "another store": (lambda folder: "gs://bucket", {}, r"data.source = gs://bucket is neither"),
    "another file": (with_text("a.zip", "PK"), {}, r"a.zip is no file of a known kind"),
    "no such column": (
        KINDS["pictures in Parquet"],
        {"label_column": "labels"},
        r"a.parquet has no column labels: it has image, label. Did you mean label\?",
    ),
    "no such column of a manifest": (
        KINDS["a CSV with names"],
        {"image_column": "img"},
        r"all.csv has no column img: it has label, image. Did you mean image\?",
    ),
    "a column of floats": (
        table(lambda: pa.array(PNGS, pa.binary()), LABELS.astype(float)),
        {},
        r"column label is of type double, where integers from 0 or strings are right",
    ),
    "images of text": (
        table(lambda: pa.array(NAMED)),
        {},
        r"column image is of type string, where bytes",
    ),
    "bytes of nothing": (
        table(lambda: pa.array([b"12345"] * COUNT, pa.binary())),
        {},
        r"column image begins with values of 5, which are no picture files and no pixels",
    ),
    "half a table": (half_table, {}, r"a.parquet is no intact Parquet file"),
    "tables of two types": (two_types, {}, r"column label is of type int64 in .*a.parquet and of"),
    "an empty manifest": (
        with_text("a.csv", ""),
        {},
        r"a.csv has no line that can be used: it is empty",
    ),
    "a manifest of no JSON": (with_text("a.jsonl", "x\n"), {}, r"line 1: it is no JSON"),
    "an open quote": (
        with_text("a.csv", 'image,label\n"x,1\n'),
        {},
        r"a.csv, line 2: unexpected end",
    ),
    "labels of floats": (
        with_text("a.jsonl", '{"image": "x", "label": 0.5}\n'),
        {},
        r"line 1: label is 0.5, and neither a number from 0 nor a name",
    ),
    "an unknown split": (
        with_text("a.csv", "image,label,split\nx,1,exam\n"),
        {},
        r"a.csv, line 2: split is 'exam', where train or valid is right",
    ),
    "no training part": (
        with_text("a.csv", "image,label,split\nx,1,val\n"),
        {},
        r"has only a part for valid, and none for train",
    ),
    "pictures of several shapes": (
        several_shapes,
        {},
        r"several shapes: .* is 70 x 70, .* is \d+ x \d+.\n       Choose the height",
    ),
    "an empty validation": (
        KINDS["idx files"],
        {"valid_share": 0.01},
        r"a share of 0.01 of each class of 30 samples leaves no sample for validation",
    ),
    "another number of classes": (
        KINDS["a folder of pictures"],
        {"num_classes": 4},
        r"num_classes = 4, but the data has 3 classes: ant, bee, cat. Use 3",
    ),
}


@pytest.mark.parametrize(("write", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_source_that_is_none_is_refused_with_its_place(
    write: Callable[[Path], Path], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared_from(write(tmp_path / "source"), tmp_path / "dest", **options)
    assert not (tmp_path / "dest/dataset.json").exists()


def test_no_more_bad_samples_are_shown_than_a_person_reads(tmp_path: Path) -> None:
    source = made.write_table(tmp_path / "a.parquet", pa.array(PNGS, pa.binary()), LABELS - 3)
    with pytest.raises(
        ConfigError, match=r"cannot be used: 30, where max_bad_samples allows 0:(?s:.*)and 25 more"
    ) as error:
        prepared_from(source, tmp_path / "dest")
    assert len(str(error.value).splitlines()) == 8


def test_labels_must_be_below_the_number_of_classes(tmp_path: Path) -> None:
    source = made.write_idx(tmp_path, "train", PIXELS, LABELS)
    with pytest.raises(
        ConfigError, match=r"image 2: its label 2 is out of range: the classes are 0 to 1"
    ):
        prepared_from(source, tmp_path / "dest", num_classes=2)


def test_a_source_changes_its_stamp_with_its_files(tmp_path: Path) -> None:
    def stamp() -> str:
        return open_source(
            str(tmp_path), endpoint=None, columns=ImageColumns("image", "label"), say=print
        ).stamp

    made.write_folder(tmp_path, PNGS, LABELS)
    before = stamp()
    assert stamp() == before
    (tmp_path / "ant/more.png").write_bytes(PNGS[0])
    assert stamp() != before
