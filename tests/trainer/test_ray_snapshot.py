"""Ray Train's own state of a run: cut off or wrong, an intact copy takes its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainyard_trainer.on_ray.ray_snapshot import RaySnapshot
from trainyard_trainer.run_files.names import RAY_SNAPSHOT
from trainyard_trainer.run_folder.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(str(tmp_path), "run")


def state(*names: str) -> str:
    return json.dumps({"checkpoint_results": [{"checkpoint_dir_name": name} for name in names]})


def write(folder: RunFolder, text: str, *checkpoints: str) -> None:
    folder.write(f"{folder.root}/{RAY_SNAPSHOT}", text)
    for name in checkpoints:
        folder.write(f"{folder.root}/{name}/state.pt", "weights")


def repaired(folder: RunFolder) -> tuple[str | None, list[str]]:
    """What Ray Train will find, and what was said."""
    said: list[str] = []
    RaySnapshot(folder).repair(said.append)
    path = f"{folder.root}/{RAY_SNAPSHOT}"
    return (folder.read(path).decode() if folder.exists(path) else None), said


def test_where_there_is_none_nothing_is_done(folder: RunFolder) -> None:
    assert repaired(folder) == (None, [])


def test_an_intact_one_stays(folder: RunFolder) -> None:
    write(folder, state("a"), "a")
    assert repaired(folder) == (state("a"), [])


@pytest.mark.parametrize("broken", ["", state("a")[:-3], "[]", state("a", "gone")])
def test_a_broken_one_is_replaced_by_the_last_intact_copy(folder: RunFolder, broken: str) -> None:
    write(folder, state("a"), "a")
    RaySnapshot(folder).keep()
    write(folder, broken)
    RaySnapshot(folder).keep()  # what is broken is no copy
    found, (said,) = repaired(folder)
    assert found == state("a")
    assert "its last intact copy is used" in said
    assert folder.read(f"{folder.root}/{RAY_SNAPSHOT}.broken").decode() == broken


def test_without_a_copy_ray_train_starts_without_it(folder: RunFolder) -> None:
    write(folder, state("gone"))
    found, (said,) = repaired(folder)
    assert found is None
    assert "lists checkpoint gone, which no longer exists: Ray Train starts without it" in said


def test_a_copy_whose_checkpoint_is_gone_is_not_used(folder: RunFolder) -> None:
    write(folder, state("a"), "a")
    RaySnapshot(folder).keep()
    folder.delete(f"{folder.root}/a")
    assert repaired(folder)[0] is None
