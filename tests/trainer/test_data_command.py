"""`python -m trainyard_trainer.tools.data`: prepare and inspect, on a disk and on S3."""

from __future__ import annotations

import json
from pathlib import Path

import made_sources as made
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import fs
from training import open_folder, small_config

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.preparation import run_data
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.recipes.image_classification.recipe import Classification
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools.data import main

COUNT = 60


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    images = [made.png(image) for image in made.pixels(COUNT, channels=3, side=20)]
    return made.write_folder(tmp_path / "pictures", images, made.labels(COUNT))


def test_prepare_says_what_it_has_made(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prepare", "--size=16", "--jobs=2", "--", str(pictures), f"{tmp_path}/dest"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("48 training and 12 validation images of 3 x 16 x 16, raw, 3 classes, ")
    assert said.endswith(f" in 2 files: {tmp_path}/dest\n")
    assert main(words) == 0
    assert "was finished before" in capsys.readouterr().err


def test_bad_samples_are_told(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "ant/000003.png").write_bytes(b"")
    words = ["prepare", str(pictures), f"{tmp_path}/dest"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {pictures}: samples that cannot be used: 1, where max_bad_")
    assert "ant/000003.png: it is empty" in error
    assert main([*words, "--max-bad-samples", "1"]) == 0
    assert "bad samples left out: 1;" in capsys.readouterr().out
    assert main(["inspect", f"{tmp_path}/dest"]) == 0
    assert "ant/000003.png: it is empty" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "digits", "d", "--size", "0"], "0 is not a whole number of at least 1"),
        (["prepare", "digits", "d", "--valid-share", "1"], "1 is not a number between 0 and 1"),
        (["prepare", "digits", "d", "--channels", "2"], "2 is not one of 1, 3"),
        (["prepare", "digits", "d", "--max-bad", "2"], "unrecognized arguments: --max-bad"),
        (["inspect"], "arguments are required: SOURCE"),
        ([], "arguments are required: prepare | inspect"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_no_source_is_an_error_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{tmp_path}/none"]) == 2
    assert capsys.readouterr().err == f"error: there is no {tmp_path}/none.\n"


def inspected(source: Path | str, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["inspect", str(source), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_knows_a_prepared_data_set(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["prepare", str(pictures), f"{tmp_path}/dest"])
    capsys.readouterr()
    found = inspected(tmp_path / "dest", capsys)
    assert (found["kind"], found["encoding"], found["shape"]) == ("prepared", "raw", [3, 20, 20])
    train = found["splits"]["train"]
    assert (train["samples"], train["class_counts"], train["files"]) == (48, [16, 16, 16], 1)
    assert (train["row_groups"], train["rows_per_file"]) == (4, 48)
    assert train["decoded_bytes"] == 48 * 1200
    assert main(["inspect", f"{tmp_path}/dest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "images: raw, shape 3 x 20 x 20 (channels x rows x columns)"
    assert any(line.split() == ["bee", "16", "4"] for line in lines)


def test_inspect_knows_a_source_without_preparing_it(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspected(pictures, capsys)
    assert found["kind"] == "folder of pictures, a sub-folder per class"
    assert found["splits"]["all"]["class_counts"] == [20, 20, 20]
    size = sum(path.stat().st_size for path in pictures.rglob("*.png"))
    assert found["splits"]["all"]["bytes"] == size
    assert found["shape"] == [3, 20, 20]

    idx = made.write_idx(tmp_path / "idx", "train", made.pixels(9), made.labels(9))
    assert inspected(idx.parent, capsys)["encoding"] == "raw"
    marks = [0, 1, -1, 2]
    table = made.write_table(
        tmp_path / "a.parquet", pa.array([made.png(image) for image in made.pixels(4)]), marks
    )
    found = inspected(table, capsys)
    assert found["bad_samples"] == [
        {
            "place": "a.parquet, row 2",
            "reason": "its label -1 is out of range: the classes are 0 to 2",
        }
    ]
    assert main(["inspect", "digits"]) == 0
    assert "built in" in capsys.readouterr().out


@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "as it is"])
def test_a_grid_shows_a_few_of_each_class(
    is_prepared: bool, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(pictures)
    if is_prepared:
        source = f"{tmp_path}/dest"
        main(["prepare", str(pictures), source, "--encoding=encoded"])
    assert main(["inspect", source, f"--grid={tmp_path}/grid.png"]) == 0
    with Image.open(tmp_path / "grid.png") as grid:
        assert min(grid.size) > 500
        assert len(np.unique(np.asarray(grid))) > 200
    assert main(["inspect", source, f"--grid={tmp_path}/no/grid.png"]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_a_source_and_a_destination_may_lie_on_s3(
    storage: tuple[str, str | None],
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, endpoint = storage
    source, dest = f"{path}/source", f"{path}/dest"
    filesystem, root = open_filesystem(source, endpoint)
    filesystem.create_dir(root)
    fs.copy_files(str(pictures), root, destination_filesystem=filesystem)
    there = [f"--endpoint={endpoint}"] if endpoint else []
    assert main(["prepare", *there, "--size=16", source, dest]) == 0
    assert main(["prepare", *there, "--size=16", source, dest]) == 0
    capsys.readouterr()
    assert inspected(dest, capsys, *there)["splits"]["train"]["samples"] == 48

    # The same bytes as on a disk, but for the name of the source.
    assert main(["prepare", "--size=16", str(pictures), f"{tmp_path}/local"]) == 0
    store, folder = open_filesystem(dest, endpoint)
    known = json.loads(store.open_input_stream(f"{folder}/dataset.json").read())
    local = json.loads((tmp_path / "local/dataset.json").read_text())
    assert known["images"] | {"source": ""} == local["images"] | {"source": ""}
    selector = fs.FileSelector(folder, recursive=True)
    files = [info.path for info in store.get_file_info(selector) if info.type == fs.FileType.File]
    assert len(files) == 3

    # A run uses it in place.
    prepared = run_data.open_data(
        Data(source=dest),
        open_folder(small_config(tmp_path)),
        form=Classification(Model(name="resnet18", in_channels=3, num_classes=3)).prepare_options(),
        storage_endpoint=endpoint,
        say=print,
    )
    table = pq.read_table(list(prepared.train.files), filesystem=prepared.open_filesystem())
    assert decode(table, prepared.info)["image"].shape == (48, 3, 16, 16)
