"""A checkpoint is there whole or not at all, wherever its writer dies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

from trainer import resume
from trainer.checkpoint import MODEL, STATE, Checkpoints
from trainer.errors import RunError
from trainer.folder import RunFolder
from trainer.progress import Trained


class Killed(BaseException):
    """The process ends here; nothing that follows reaches the disk."""


class Mortal:
    """A local filesystem whose process dies before its n-th change to the disk."""

    def __init__(self, dies_before: int) -> None:
        self.real = fs.LocalFileSystem()
        self.left = dies_before

    def change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def create_dir(self, path: str) -> None:
        self.change()
        self.real.create_dir(path)

    def move(self, source: str, target: str) -> None:
        self.change()
        self.real.move(source, target)

    def delete_file(self, path: str) -> None:
        self.change()
        self.real.delete_file(path)

    def delete_dir(self, path: str) -> None:
        for file in sorted(Path(path).iterdir()):
            self.delete_file(str(file))
        self.change()
        self.real.delete_dir(path)

    def open_output_stream(self, path: str) -> MortalStream:
        self.change()
        return MortalStream(self.real.open_output_stream(path), self)


class MortalStream:
    def __init__(self, real: Any, owner: Mortal) -> None:
        self.real = real
        self.owner = owner

    def __enter__(self) -> MortalStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.real.close()

    def write(self, data: bytes) -> None:
        self.owner.change()
        self.real.write(data)


def mortal_folder(path: Path, dies_before: int) -> RunFolder:
    folder = RunFolder.open(str(path), "small")
    folder.filesystem = Mortal(dies_before)  # type: ignore[assignment]
    return folder


def save(folder: RunFolder, number: int, *, attempt: int = 1, keep: int = 2) -> str:
    """A checkpoint whose weights are its number."""
    return Checkpoints(folder).save(
        Trained(epoch=number, step=number * 10, samples=number * 100),
        attempt=attempt,
        keep=keep,
        model={"weight": torch.full((50,), float(number))},
        state={"optimizer": {"lr": 0.1}},
        config={"name": "small"},
    )


def weight(folder: RunFolder, name: str) -> float:
    return Checkpoints(folder).load(name, MODEL)["weight"][0].item()


def open_small(path: Path) -> RunFolder:
    return RunFolder.open(str(path), "small")


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_between_any_two_writes_leaves_a_loadable_run(tmp_path: Path, keep: int) -> None:
    for dies_before in itertools.count():
        path = tmp_path / str(dies_before)
        first = save(open_small(path), 1)
        killed = mortal_folder(path, dies_before)
        try:
            save(killed, 2, keep=keep)
        except Killed:
            was_killed = True
        else:
            was_killed = False

        # The next attempt starts from one of the two, and can save its own.
        folder = open_small(path)
        folder.sweep()
        start = resume.begin(folder, print)
        assert start is not None
        assert weight(folder, start.name) == start.trained.epoch
        assert start.name == first or start.trained.epoch == 2
        second = save(folder, 2, attempt=2, keep=1)
        assert Checkpoints(folder).names() == [second]
        assert folder.files() == [
            f"checkpoints/{second}/{file}" for file in sorted(("manifest.json", MODEL, STATE))
        ]
        if not was_killed:
            break
    assert dies_before > 10, "too few points of death to mean anything"


def test_a_write_that_was_never_committed_is_passed_over_and_removed(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    first, second = save(folder, 1), save(folder, 2)
    folder.delete(Checkpoints(folder).path(second, "manifest.json"))
    said: list[str] = []
    start = resume.begin(folder, said.append)
    assert start is not None
    assert start.name == first
    assert said == [
        f"checkpoint {second} is passed over: it was never committed: manifest.json is missing"
    ]
    assert Checkpoints(folder).names() == [first]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "its manifest says"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its SHA-256 differs"),
        (lambda data: b"", "model.pt is 0 bytes long"),
        (None, "model.pt is missing"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: Any, reason: str
) -> None:
    folder = open_small(tmp_path)
    first, second = save(folder, 1), save(folder, 2)
    file = Path(Checkpoints(folder).path(second, MODEL))
    if damage:
        file.write_bytes(damage(file.read_bytes()))
    else:
        file.unlink()
    said: list[str] = []
    newest = Checkpoints(folder).newest(said.append)
    assert newest is not None
    assert newest.name == first
    assert len(said) == 1
    assert reason in said[0]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"files": {}}', "[]"])
def test_a_manifest_that_cannot_be_read_makes_no_checkpoint(tmp_path: Path, text: str) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    folder.write(Checkpoints(folder).path(name, "manifest.json"), text)
    assert Checkpoints(folder).newest() is None
    assert resume.begin(folder, print) is None
    assert Checkpoints(folder).names() == []


def test_a_checkpoint_of_another_version_is_neither_used_nor_removed(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    folder.write(Checkpoints(folder).path(name, "manifest.json"), '{"format": 2}')
    with pytest.raises(RunError, match="has format 2, this program reads 1"):
        resume.begin(folder, print)
    assert Checkpoints(folder).names() == [name]


def test_the_newest_stay(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    names = [save(folder, number, keep=3) for number in range(1, 6)]
    assert Checkpoints(folder).names() == list(reversed(names[2:]))


def test_names_sort_by_progress_and_then_by_attempt(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    for number, attempt in ((2, 9), (2, 10), (1, 11)):
        save(folder, number, attempt=attempt, keep=9)
    assert Checkpoints(folder).names() == [
        "s000000000200-a10",
        "s000000000200-a9",
        "s000000000100-a11",
    ]


def test_nothing_saved_is_nothing_to_start_from(tmp_path: Path) -> None:
    assert resume.begin(open_small(tmp_path), print) is None
