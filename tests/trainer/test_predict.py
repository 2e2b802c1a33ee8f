"""Pictures go the way of validation images, and come back with labels."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.trainer.saved_run import IMAGES, open_small, save, weights_of
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.image_classification.on_device import ToInput
from trainyard_trainer.recipes.saved_model import deliver, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools import predict
from trainyard_trainer.tools.inspection.grid import MOST, draw_grid, shortened
from trainyard_trainer.tools.prediction.classifier import classify_files

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = open_small(tmp_path)
    name = save(folder, 1, weights=weights_of(1))
    deliver(folder, Checkpoints(folder), Checkpoints(folder).read_manifest(name))
    return folder


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, *IMAGES.shape), dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path, pixels: np.ndarray) -> list[str]:
    paths = [str(tmp_path / f"{number}.png") for number in range(len(pixels))]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image[0]).save(path)
    return paths


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_a_picture_gets_what_its_pixels_get_in_validation(
    folder: RunFolder, files: list[str], pixels: np.ndarray, batch_size: int
) -> None:
    saved = read_saved(folder, "delivered")
    with torch.inference_mode():
        inputs = ToInput(IMAGES, 16, CPU)(torch.from_numpy(pixels))
        shares, labels = saved.build()(inputs).softmax(dim=1).sort(dim=1, descending=True)
    answers = classify_files(saved, files, top=2, batch_size=batch_size, device=CPU)
    assert [answer.file for answer in answers] == files
    for answer, wanted, sure in zip(answers, labels.tolist(), shares.tolist(), strict=True):
        assert [label for label, _ in answer.top] == [IMAGES.classes[n] for n in wanted[:2]]
        assert [each for _, each in answer.top] == pytest.approx(sure[:2], abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("BMP", "RGB"),
        ("GIF", "P"),
        ("WEBP", "RGBA"),
        ("TIFF", "1"),
    ],
)
def test_pictures_of_any_format_size_and_colours_are_read(
    folder: RunFolder, tmp_path: Path, kind: str, mode: str
) -> None:
    image = Image.linear_gradient("L").resize((60, 40)).convert(mode)
    image.save(tmp_path / "picture", kind)
    (answer,) = classify_files(
        read_saved(folder, "last"), [str(tmp_path / "picture")], top=1, batch_size=8, device=CPU
    )
    assert answer.pixels.shape == IMAGES.shape


def test_all_files_that_are_no_pictures_are_told_and_nothing_is_printed(
    folder: RunFolder, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    cut = io.BytesIO()
    Image.linear_gradient("L").save(cut, "PNG")
    (tmp_path / "cut.png").write_bytes(cut.getvalue()[:200])
    wrong = [str(tmp_path / name) for name in ("text.png", "cut.png", "none.png", "")]
    with pytest.raises(ConfigError) as raised:
        predict.main([folder.root, files[0], *wrong, *files[1:], "--batch-size", "2"])
    lines = str(raised.value).splitlines()
    assert lines[0] == "4 of 11 files cannot be used:"
    assert [line.strip().partition(":")[0] for line in lines[1:]] == wrong
    assert "it is no picture of a known format" in lines[1]
    assert "No such file" in lines[3]
    assert capsys.readouterr().out == ""


def test_answers_are_a_table_or_json(
    folder: RunFolder, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main([folder.root, *files[:2], "--top", "9"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "file"
    assert "label 3" in head
    assert [row.split()[0] for row in rows] == files[:2]
    predict.main([folder.root, *files[:2], "--json"])
    records = json.loads(capsys.readouterr().out)
    assert [record["file"] for record in records] == files[:2]
    assert records[0]["top"] == [
        {"label": records[0]["label"], "confidence": records[0]["confidence"]}
    ]


def test_the_grid_is_a_png_file(
    folder: RunFolder, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "new" / "grid.png"
    predict.main([folder.root, *files, "--grid", str(grid)])
    with Image.open(grid) as image:
        assert image.format == "PNG"
        assert image.width >= 3 * 100
    assert capsys.readouterr().err == f"grid: {grid}\n"


def test_a_grid_that_cannot_be_written_is_told(
    folder: RunFolder, files: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--grid = .* cannot be written"):
        predict.main([folder.root, *files, "--grid", f"{files[0]}/grid.png"])


def test_a_grid_takes_colours_and_no_more_than_can_be_seen() -> None:
    pictures = [(np.zeros((3, 4, 4), np.uint8), "a $ long_caption")] * (MOST + 5)
    with Image.open(io.BytesIO(draw_grid(pictures))) as image:
        assert image.width == image.height
    assert shortened("x" * 99) == "x" * 23 + "…"
