"""Labels for all rows of tables of images: each row is accounted for, and says what `predict` says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pyarrow import fs

from tests.trainer.saved_run import IMAGES, open_small, save, weights_of
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.data.sources.rows import readers
from trainyard_trainer.data.stored_rows import header_of, pixels_to_values, write_part
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.saved_model import deliver, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.prediction import batch_prediction, prediction_input
from trainyard_trainer.tools.prediction.classifier import Classifier, classify_files

CPU = torch.device("cpu")
COUNT = 23


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = open_small(tmp_path / "runs")
    name = save(folder, 1, weights=weights_of(1))
    deliver(folder, Checkpoints(folder), Checkpoints(folder).read_manifest(name))
    return folder


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (COUNT, *IMAGES.shape), dtype=np.uint8)


def png(pixels_CHW: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels_CHW[0]).save(stream, "PNG")
    return stream.getvalue()


def expected(run: RunFolder, pixels: np.ndarray, folder: Path, top: int = 2) -> list[Any]:
    """What `predict` says of the same pictures."""
    folder.mkdir(exist_ok=True)
    files = [str(folder / f"{number}.png") for number in range(len(pixels))]
    for file, image in zip(files, pixels, strict=True):
        Path(file).write_bytes(png(image))
    saved = read_saved(run, "delivered")
    return [
        answer.top for answer in classify_files(saved, files, top=top, batch_size=64, device=CPU)
    ]


def predicted(
    run: RunFolder, data: Path, out: Path, *, top: int = 2, **columns: str
) -> tuple[batch_prediction.Writer, list[dict[str, Any]]]:
    """What is written of a data set by all parts that need no Ray."""
    saved = read_saved(run, "delivered")
    inputs = prediction_input.open_inputs(str(data), None, columns.get("image_column", "image"))
    writer = batch_prediction.Writer(
        inputs=inputs,
        filesystem=fs.LocalFileSystem(),
        out=RunFolder(fs.LocalFileSystem(), str(out)),
        classes=IMAGES.classes,
        top=top,
        label_column=columns.get("label_column", "label"),
    )
    classifier = Classifier(saved, CPU)
    for stretch in prediction_input.stretches_of(inputs, IMAGES.bytes_per_sample):
        file = inputs[stretch.file]
        for rows in prediction_input.read_stretch(
            file, stretch, fs.LocalFileSystem(), IMAGES.shape
        ):
            writer.add(batch_prediction.answers_to(classifier, rows, top=top, batch_size=64))
    writer.finish()
    written = [pq.read_table(out / file.name) for file in inputs]
    return writer, [row for table in written for row in table.to_pylist()]


def tops(rows: list[dict[str, Any]]) -> list[Any]:
    return [tuple((each["class"], each["probability"]) for each in row["top"]) for row in rows]


def check_same(found: list[Any], wanted: list[Any]) -> None:
    """The last digits of an answer are those of the pictures that are computed together."""
    for one, other in zip(found, wanted, strict=True):
        assert [label for label, _ in one] == [label for label, _ in other]
        assert [sure for _, sure in one] == pytest.approx([sure for _, sure in other], abs=1e-5)


def write(path: Path, rows_per_group: int = 5, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def nested(pixels: np.ndarray) -> pa.Array:
    return pa.array(pixels[:, 0].tolist(), pa.list_(pa.list_(pa.uint8())))


@pytest.mark.parametrize("form", ["pictures", "struct", "pixels", "lists", "prepared"])
def test_a_row_gets_what_its_picture_gets(
    run: RunFolder, pixels: np.ndarray, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_input, "PART_BYTES", 7 * IMAGES.bytes_per_sample)
    data, names = tmp_path / "data", [f"row {number}" for number in range(COUNT)]
    images = {
        "pictures": pa.array([png(image) for image in pixels]),
        "struct": pa.array([{"bytes": png(image), "path": None} for image in pixels]),
        "pixels": pixels_to_values(pixels),
        "lists": nested(pixels),
    }
    if form == "prepared":
        header = header_of("digits", IMAGES.shape, "raw", ("two", "one", "zero"))
        (data / "train").mkdir(parents=True)
        for number, (start, end) in enumerate([(0, 9), (9, COUNT)]):
            part = write_part(
                header,
                "a file",
                start,
                pixels_to_values(pixels[start:end]),
                np.zeros(end - start, int),
            )
            (data / f"train/part-{number:05}.parquet").write_bytes(part)
    else:
        for number, (start, end) in enumerate([(0, 9), (9, 9), (9, COUNT)]):
            part = {"image": images[form].slice(start, end - start), "name": names[start:end]}
            write(data / f"deep/{number}.parquet", **part)
    writer, rows = predicted(run, data, tmp_path / "out")
    wanted = expected(run, pixels, tmp_path / "pictures")
    check_same(tops(rows), wanted)
    assert [(row["predicted"], row["probability"]) for row in rows] == [
        top[0] for top in tops(rows)
    ]
    assert {row["error"] for row in rows} == {None}
    if form == "prepared":
        assert [row["id"] for row in rows] == [*range(COUNT)]
        # The file's own names count, not the model's: its class 0 is `two`.
        assert writer.labelled_rows == COUNT
        assert writer.agreeing_rows == sum(top[0][0] == "two" for top in wanted)
    else:
        assert [row["name"] for row in rows] == names
        assert [*rows[0]] == ["name", "predicted", "probability", "top", "error"]


def test_rows_without_an_image_that_can_be_used_say_why(
    run: RunFolder, pixels: np.ndarray, tmp_path: Path
) -> None:
    pictures = [png(image) for image in pixels]
    pictures[3], pictures[4], pictures[20] = b"no picture", None, pictures[20][:40]  # type: ignore[call-overload]
    labels = ["zero"] * 10 + [None] * 13
    write(tmp_path / "data.parquet", photo=pictures, truth=labels)
    columns = {"image_column": "photo", "label_column": "truth"}
    writer, rows = predicted(run, tmp_path / "data.parquet", tmp_path / "out", top=1, **columns)
    assert len(rows) == COUNT
    bad = {number: row["error"] for number, row in enumerate(rows) if row["predicted"] is None}
    assert [*bad] == [3, 4, 20]
    assert bad[3] == "it is no picture of a known format"
    assert bad[4] == "it has no image"
    assert [number for number, row in enumerate(rows) if row["error"]] == [3, 4, 20]
    assert [*rows[0]] == ["truth", "predicted", "probability", "error"]
    good = [row["predicted"] for number, row in enumerate(rows) if number not in bad]
    assert good == [
        top[0][0] for n, top in enumerate(expected(run, pixels, tmp_path / "p")) if n not in bad
    ]
    summary = batch_prediction.summary_of(writer, 2.0)
    assert (summary["rows"], summary["rows_without_prediction"]) == (COUNT, 3)
    assert (summary["labelled_rows"], summary["rows_per_second"]) == (8, 11.5)
    assert summary["agreement"] == sum(row["predicted"] == "zero" for row in rows[:10]) / 8
    assert "3 of them have no prediction" in batch_prediction.summary_text(summary, "truth")
    assert "agreement with column truth: " in batch_prediction.summary_text(summary, "truth")


def test_pixels_of_another_size_or_colour_go_the_way_of_their_picture(
    run: RunFolder, tmp_path: Path
) -> None:
    colours = np.random.default_rng(1).integers(0, 256, (4, 20, 12, 3), dtype=np.uint8)
    kind = pa.list_(pa.list_(pa.list_(pa.uint8())))
    write(tmp_path / "data.parquet", image=pa.array(colours.tolist(), kind))
    _, rows = predicted(run, tmp_path / "data.parquet", tmp_path / "out")
    files = [str(tmp_path / f"{number}.png") for number in range(4)]
    for file, image in zip(files, colours, strict=True):
        Image.fromarray(image).save(file)
    saved = read_saved(run, "delivered")
    answers = classify_files(saved, files, top=2, batch_size=64, device=CPU)
    # The same pictures are computed together here and there: not a bit is another one.
    assert tops(rows) == [answer.top for answer in answers]


@pytest.mark.parametrize("kind", ["files", "pixels", "blobs"])
def test_a_data_set_of_lance_gets_the_predictions_of_the_same_table_in_parquet(
    run: RunFolder, pixels: np.ndarray, tmp_path: Path, kind: str
) -> None:
    lance = pytest.importorskip("lance")
    files = [png(image) for image in pixels]
    labels = [IMAGES.classes[number % len(IMAGES.classes)] for number in range(COUNT)]
    images = nested(pixels) if kind == "pixels" else pa.array(files, pa.large_binary())
    metadata = {"lance-encoding:blob": "true"} if kind == "blobs" else None
    image = pa.field("image", images.type, metadata=metadata)
    table = pa.table([images, labels], schema=pa.schema([image, ("label", pa.string())]))
    write(tmp_path / "parquet/photos.parquet", image=images, label=labels)
    folder = str(tmp_path / "photos.lance")
    lance.write_dataset(table, folder, max_rows_per_file=7)
    lance.dataset(folder).delete("true")  # a later version: the one that is named is read
    _, wanted = predicted(run, tmp_path / "parquet", tmp_path / "a")
    writer, found = predicted(run, Path(f"{folder}@1"), tmp_path / "b")
    assert [row["label"] for row in found] == labels
    assert [row["predicted"] for row in found] == [row["predicted"] for row in wanted]
    check_same(tops(found), tops(wanted))
    assert writer.labelled_rows == COUNT
    assert (tmp_path / "b/photos.parquet").is_file()


def write_shard(folder: Path, pixels: np.ndarray) -> str:
    with tarfile.open(folder / "photos.tar", "w") as shard:
        for number, image in enumerate(pixels):
            for name, data in (("png", png(image)), ("cls", b"1")):
                entry = tarfile.TarInfo(f"{number:04}.{name}")
                entry.size = len(data)
                shard.addfile(entry, io.BytesIO(data))
    return "png"


def write_arrays(folder: Path, pixels: np.ndarray) -> str:
    np.savez(folder / "photos.npz", image=pixels[:, 0], cls=np.ones(len(pixels), np.int64))
    return "image"


def write_arrow(folder: Path, pixels: np.ndarray) -> str:
    images = [{"bytes": png(image), "path": None} for image in pixels]
    table = pa.table({"picture": images, "cls": [1] * len(pixels)})
    with pa.ipc.new_stream(str(folder / "photos.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=8)
    return "picture"


@pytest.mark.parametrize("write_images", [write_shard, write_arrays, write_arrow])
def test_each_kind_of_table_is_read_in_groups(
    run: RunFolder,
    pixels: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_images: Any,
) -> None:
    monkeypatch.setattr(readers, "TAR_GROUP_BYTES", 4_000)
    monkeypatch.setattr(prediction_input, "PART_BYTES", 7 * IMAGES.bytes_per_sample)
    (tmp_path / "data").mkdir()
    column = write_images(tmp_path / "data", pixels)
    writer, rows = predicted(
        run, tmp_path / "data", tmp_path / "out", image_column=column, label_column="cls"
    )
    check_same(tops(rows), expected(run, pixels, tmp_path / "pictures"))
    assert {row["cls"] for row in rows} == {1}
    assert (writer.rows, writer.labelled_rows) == (COUNT, COUNT)
    assert (tmp_path / "out/photos.parquet").is_file()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (None, "there is no .*data.parquet"),
        ({"picture": [b"x"]}, "has no column image; its columns are picture"),
        ({"image": ["text"]}, "column image is of type string"),
        ({"image": [b"x"], "error": [1]}, "already has a column error"),
    ],
)
def test_what_is_no_data_set_of_images_is_told(
    tmp_path: Path, columns: dict[str, Any] | None, problem: str
) -> None:
    if columns:
        write(tmp_path / "data.parquet", **columns)
    with pytest.raises(ConfigError, match=problem):
        prediction_input.open_inputs(str(tmp_path / "data.parquet"), None, "image")


def test_a_column_of_labels_that_was_named_must_be_there(tmp_path: Path) -> None:
    write(tmp_path / "data.parquet", image=[png(np.zeros((1, 8, 8), np.uint8))])
    with pytest.raises(ConfigError, match=r"has no column truth \(--label-column\)"):
        prediction_input.open_inputs(str(tmp_path), None, "image", "truth")


def test_a_folder_without_tables_and_a_file_that_is_cut_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no table of images \(files: none\)"):
        prediction_input.open_inputs(str(tmp_path), None, "image")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="no intact Parquet file"):
        prediction_input.open_inputs(str(tmp_path), None, "image")


def test_rows_that_come_twice_or_not_at_all_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "data.parquet", image=[png(np.zeros((1, 8, 8), np.uint8))] * 3)
    writer = batch_prediction.Writer(
        inputs=prediction_input.open_inputs(str(tmp_path / "data.parquet"), None, "image"),
        filesystem=fs.LocalFileSystem(),
        out=RunFolder(fs.LocalFileSystem(), str(tmp_path / "out")),
        classes=(),
        top=1,
        label_column="label",
    )
    row = {"row": [0], **{name: [None] for name in prediction_input.ANSWER.names}}
    answer = pa.table(row, schema=pa.schema([("row", pa.int64()), *prediction_input.ANSWER]))
    writer.add(answer)
    with pytest.raises(ValueError, match="expected rows from 1 on"):
        writer.add(answer)
    with pytest.raises(ValueError, match=r"of data\.parquet are missing"):
        writer.finish()


# The command, with Ray.


def command(*words: str, code: int = 0) -> str:
    """Both streams of `trainyard predict ...`."""
    called = [sys.executable, "-m", "trainyard", "predict", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        called, capture_output=True, text=True, env=environment | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.ci
def test_what_cannot_be_is_refused_before_ray_starts(run: RunFolder, tmp_path: Path) -> None:
    write(tmp_path / "data/a.parquet", image=[png(np.zeros((1, 8, 8), np.uint8))])
    options = ("--data", str(tmp_path / "data"), "--out", str(tmp_path / "data"))
    said = command(run.root, *options, code=2)
    assert (
        said == f"error: --out = {tmp_path}/data exists already. Name another one, or remove it.\n"
    )


@pytest.mark.slow
def test_ray_data_labels_a_bucket_in_the_order_of_its_rows(
    run: RunFolder, pixels: np.ndarray, storage: tuple[str, str | None], tmp_path: Path
) -> None:
    path, endpoint = storage
    data = RunFolder.open(path, "data", endpoint)
    pictures: list[bytes | None] = [png(image) for image in pixels]
    pictures[5] = b"no picture"
    for number, (start, end) in enumerate([(0, 9), (9, COUNT)]):
        file = write(
            tmp_path / "part.parquet",
            image=pictures[start:end],
            label=[0] * (end - start),
            name=[f"row {row}" for row in range(start, end)],
        )
        data.write(f"{data.root}/deep/{number}.parquet", file.read_bytes())
    where = ("--endpoint", endpoint) if endpoint else ()
    options = ("--data", f"{path}/data", "--out", f"{path}/labels", "--top", "2", "--json", *where)
    said = command(run.root, *options)
    summary = json.loads(said[said.index("{") : said.rindex("}") + 1])
    out = data.sibling("labels")
    assert json.loads(out.read(f"{out.root}/predictions.json")) == summary
    assert (summary["rows"], summary["rows_without_prediction"]) == (COUNT, 1)
    tables = [
        pq.read_table(pa.BufferReader(out.read(f"{out.root}/deep/{number}.parquet")))
        for number in range(2)
    ]
    rows = pa.concat_tables(tables).to_pylist()
    assert [row["name"] for row in rows] == [f"row {row}" for row in range(COUNT)]
    assert rows[5]["error"] == "it is no picture of a known format"
    wanted = expected(run, pixels, tmp_path / "pictures")
    check_same(tops(rows[:5] + rows[6:]), wanted[:5] + wanted[6:])
    agreeing = sum(row["predicted"] == "zero" for row in rows)
    assert summary["agreement"] == pytest.approx(agreeing / (COUNT - 1), abs=1e-6)
    assert "exists already" in command(run.root, *options, code=2)


@pytest.mark.ci
def test_a_model_of_text_takes_no_data_set(tmp_path: Path) -> None:
    folder = open_small(tmp_path / "runs")
    language = {"context_length": 8, "width": 8, "depth": 1, "heads": 1}
    facts = {"run": "small", "recipe": "language_model", "model": language}
    folder.write(folder.model_facts, json.dumps(facts))
    with folder.writing(folder.model) as stream:
        torch.save({}, stream)
    write(tmp_path / "data/a.parquet", image=[png(np.zeros((1, 8, 8), np.uint8))])
    options = ("--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"))
    assert "takes text: trainyard predict RUN --prompt TEXT" in command(
        folder.root, *options, code=2
    )
