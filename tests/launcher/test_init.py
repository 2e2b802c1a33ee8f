"""A new run file explains every key, loads, can be planned, and overwrites nothing."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.__main__ import run
from trainyard.planning.authoring.init import default_batch, run_text
from trainyard.planning.plan import plan_run
from trainyard.platform import Platform
from trainyard.run_file.load import load_run

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    returncode: int
    stderr: str


Init = Callable[..., Ended]


@pytest.fixture
def init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Init:
    """`trainyard init` in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)

    def run_init(*arguments: str) -> Ended:
        code = run(["init", *arguments])
        printed = capsys.readouterr()
        assert printed.out == ""
        return Ended(code, printed.err)

    return run_init


def test_without_any_word_it_is_the_digits_run(
    init: Init, tmp_path: Path, platform: Platform
) -> None:
    ended = init("digits.yaml")
    assert ended.returncode == 0, ended.stderr
    assert "digits.yaml is written" in ended.stderr
    written = load_run(tmp_path / "digits.yaml")
    assert (written.name, written.data.source, written.resources.bounds) == (
        "digits",
        "digits",
        (2, 2),
    )
    assert plan_run(written, platform, "team").workers == 2


def test_flags_become_keys(init: Init, tmp_path: Path) -> None:
    flags = "--name photos --source s3://b/photos --classes 37 --channels 3 --model resnet50 "
    flags += "--gpus 8:24 --epochs 5"
    ended = init(*flags.split())
    assert ended.returncode == 0, ended.stderr
    written = load_run(tmp_path / "run.yaml")
    assert (written.name, written.data.source, written.resources.bounds) == (
        "photos",
        "s3://b/photos",
        (8, 24),
    )
    assert (written.train.model.name, written.train.model.num_classes) == ("resnet50", 37)
    # 8, 16 and 24 workers share it.
    assert (written.train.epochs, written.train.global_batch_size) == (5, 96)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpus", "12", "--batch-size", "64"], "Use 8 or 16 GPUs"),
        (["--gpus", "x"], "resources.gpus = 'x'"),
        (["--gpus", "1:8192"], "grows by whole nodes"),
        (["--gpus", "2", "--workers", "2"], "exclude each other"),
        (["--name", "Digits"], "at most 38 characters"),
        (["--source", "s3://bucket/x"], "the numbers of classes and channels of s3://bucket/x"),
        (
            ["--source", "mnist", "--classes", "9", "--channels", "1"],
            "must be digits, stdlib, breast_cancer, a path",
        ),
        (["--epochs", "0"], "train.epochs = 0"),
        (["there.yaml"], "there.yaml exists already and is not overwritten"),
        (["none/run.yaml"], "cannot write none/run.yaml"),
    ],
)
def test_a_run_that_cannot_be_is_not_written(
    init: Init, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine\n")
    ended = init(*arguments)
    assert ended.returncode == 2, ended.stderr
    assert problem in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["there.yaml"]
    assert there.read_text() == "mine\n"


def test_data_of_this_machine_is_taken_though_no_cluster_sees_it(
    init: Init, tmp_path: Path
) -> None:
    ended = init("--source", "./photos", "--classes", "2", "--channels", "3")
    assert ended.returncode == 0, ended.stderr
    assert load_run(tmp_path / "run.yaml").data.source == "./photos"


def test_a_terminal_is_asked(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    os.write(master, b"\ns3://b/x\n5\n\nresnet34\n8\n3\n")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "trainyard", "init", "shapes.yaml"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}/launcher:{ROOT}/train_image"},
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(master)
        os.close(terminal)
    assert ended.returncode == 0, ended.stderr
    written = load_run(tmp_path / "shapes.yaml")
    assert (written.name, written.data.source, written.resources.gpus) == ("shapes", "s3://b/x", 8)
    model = written.train.model
    assert (model.name, model.num_classes, model.in_channels) == ("resnet34", 5, 3)
    assert written.train.epochs == 3


ANSWERS: dict[str, Any] = {
    "name": "digits",
    "resources": {"workers": 2},
    "data": {"source": "digits"},
    "train": {
        "model": {"name": "resnet18", "in_channels": 1, "num_classes": 10},
        "epochs": 10,
        "global_batch_size": 64,
    },
    "checkpoint": {"keep": 2},
    "faults": {"retries": 2},
}


def test_what_stands_in_comments_is_what_holds_without_it(tmp_path: Path) -> None:
    text = run_text(ANSWERS)
    given, all_keys = tmp_path / "given.yaml", tmp_path / "all.yaml"
    given.write_text(text)
    all_keys.write_text(re.sub(r"(?m)^( *)# ([a-z_]+: \S.*)$", uncommented, text))
    assert len(yaml.safe_load(all_keys.read_text())["train"]) > len(ANSWERS["train"]) + 10
    assert load_run(all_keys) == load_run(given)


def uncommented(line: re.Match[str]) -> str:
    return f"{line[1]}{line[2]}"


@pytest.mark.parametrize(
    ("amount", "batch"),
    [
        (2, 64),
        (24, 72),
        (100, 100),
        ({"min": 8, "max": 24}, 96),
        ({"min": 8, "max": 8192}, 64),
        ({"min": 9, "max": 8}, 64),
        (-1, 64),
        ("x", 64),
    ],
)
def test_all_sizes_share_the_batch(platform: Platform, amount: Any, batch: int) -> None:
    assert default_batch(amount, "gpus", platform) == batch
