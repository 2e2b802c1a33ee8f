"""A disk that takes no more, by the kernel's own limit on the size of a file."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainyard_trainer.run_folder.folder import RunFolder

ROOM = 2**20


@contextmanager
def no_more_room() -> Iterator[None]:
    """No file may be larger than a mebibyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(str(tmp_path), "small")


def test_what_could_not_be_appended_leaves_no_part_behind(folder: RunFolder) -> None:
    path = f"{folder.root}/log"
    folder.append(path, "a line\n")
    with no_more_room(), pytest.raises(OSError, match="too large"):
        folder.append(path, b"x" * 2 * ROOM)
    assert folder.read(path) == b"a line\n"


def test_what_could_not_be_written_leaves_nothing_behind(folder: RunFolder) -> None:
    with no_more_room(), pytest.raises(OSError, match="too large"):
        folder.write(f"{folder.root}/model.pt", b"x" * 2 * ROOM)
    assert folder.files() == []


def test_room_that_is_made_is_waited_for(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = f"{folder.root}/log", resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(
        "trainyard_trainer.storage.time.sleep",
        lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, before),
    )
    with no_more_room():
        folder.outlast(lambda: folder.append(path, b"x" * 2 * ROOM))
    assert folder.size(path) == 2 * ROOM
    assert "storage: trying again for 120 s" in capsys.readouterr().out
