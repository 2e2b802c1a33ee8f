"""Facts that the launcher and the trainer share stand once, in `trainyard_trainer.run_files`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.driver_output import (
    PROGRESS,
    WORKER_FAILED,
    record_line,
    record_of,
    worker_failed,
)
from trainyard_trainer.run_files.lease import attempts_of, claim_file, ended_file
from trainyard_trainer.run_files.names import CheckpointName, checkpoint_of_manifest
from trainyard_trainer.run_folder.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "launcher/trainyard", ROOT / "train_image/trainyard_trainer")
SHARED = {
    value
    for name, value in vars(names).items()
    if name.isupper() and isinstance(value, str) and "." in value
}
"""Names of files of a run's folder, such as `summary.json`."""

OF_CHECKPOINTS = {"checkpointing", "recipes", "boosting", "engine", "report"}
"""Rooms that know files of the same names in a checkpoint's folder or in a data set's."""


def constants(path: Path) -> Iterator[ast.Constant]:
    """The texts of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node


def modules() -> list[Path]:
    return [
        path
        for package in PACKAGES
        for path in package.rglob("*.py")
        if path.parent.name != "run_files" and not OF_CHECKPOINTS & set(path.parts)
    ]


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_spells_the_name_of_a_file_of_the_runs_folder(path: Path) -> None:
    spelled = [node.lineno for node in constants(path) if node.value in SHARED]
    assert spelled == [], "take it from trainyard_trainer.run_files.names"


def test_the_runs_folder_has_the_shared_names(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "digits")
    assert folder.summary == f"{folder.root}/{names.SUMMARY}"
    assert folder.log(3) == f"{folder.root}/{names.log_of(3)}"
    assert names.attempt_of_log(names.log_of(3)) == 3
    assert names.attempt_of_log("logs/attempt-3.txt") is None


def test_what_the_driver_prints_is_what_the_launcher_reads() -> None:
    assert record_of(record_line(PROGRESS, {"step": 3}), PROGRESS) == {"step": 3}
    assert record_of(record_line(PROGRESS, {"step": 3})[:-1], PROGRESS) is None
    assert WORKER_FAILED.fullmatch(worker_failed(1, 2, "no luck"))


def test_the_newest_attempt_is_found_by_its_claim_and_not_by_those_of_its_worker_groups() -> None:
    files = [
        claim_file(1),
        ended_file(1),
        claim_file(10),
        claim_file(10, 2),
        claim_file(11, 1),
        "run.json",
    ]
    assert attempts_of(files) == [1, 10]


def test_a_checkpoint_is_known_by_its_manifest() -> None:
    name = CheckpointName(samples=640, attempt=2, group=1)
    assert checkpoint_of_manifest(f"checkpoints/{name}/manifest.json") == name
    assert checkpoint_of_manifest(f"checkpoints/{name}/model.pt") is None
    assert checkpoint_of_manifest("checkpoints/manifest.json") is None
