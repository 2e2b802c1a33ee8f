"""What must be the same for the warm process and for a run that wants to use it."""

from __future__ import annotations

import os
import site
import socket
import threading
from pathlib import Path

import pytest

from trainyard_trainer.run_files.warm import facts, messages
from trainyard_trainer.run_files.warm.facts import difference, environment_of_warm_process


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Source and installed packages that a test can change."""
    (tmp_path / "trainyard_trainer").mkdir()
    (tmp_path / "trainyard_trainer" / "a.py").write_text("")
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    monkeypatch.setattr(facts, "PACKAGES", str(tmp_path))
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, None),
        ({"PATH": "/other", "AWS_SECRET_ACCESS_KEY": "x", "CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "9", "PYTHONPATH": "/nowhere"}, None),
        ({"OMP_NUM_THREADS": "77"}, "the environment variable OMP_NUM_THREADS"),
        ({"RAY_memory_monitor_refresh_ms": "0"}, "the environment variable RAY_memory_"),
        ({"TMPDIR": "/other"}, "the environment variable TMPDIR"),
        ({"HOME": "/other"}, "the environment variable HOME"),
    ],
)
def test_a_variable_that_is_read_once_is_named_if_it_differs(
    variables: dict[str, str], named: str | None
) -> None:
    different = difference(facts.facts(), facts.facts({**os.environ, **variables}))
    assert different is None if named is None else different is not None and named in different


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "trainyard_trainer/a.py").write_text("x"), facts.SOURCE),
        (lambda folder: (folder / "trainyard_trainer/b.py").write_text(""), facts.SOURCE),
        (lambda folder: (folder / "trainyard_trainer/a.py").unlink(), facts.SOURCE),
        (
            lambda folder: (folder / "torch-2.13.0.dist-info").rename(folder / "torch-3.dist-info"),
            facts.PYTHON,
        ),
        (lambda folder: (folder / "new.pth").write_text(""), facts.PYTHON),
        (lambda folder: (folder / "notes.txt").write_text(""), None),
    ],
    ids=["edited", "added", "removed", "updated", "path added", "no package"],
)
def test_a_change_of_source_or_packages_is_named(
    folder: Path, change: object, named: str | None
) -> None:
    before = facts.facts()
    change(folder)  # type: ignore[operator]
    assert difference(before, facts.facts()) == named


def test_an_older_warm_process_without_a_fact_does_not_fit() -> None:
    mine = facts.facts()
    assert difference({key: mine[key] for key in mine if key != facts.USER}, mine) == facts.USER


def test_the_warm_process_gets_no_variable_that_may_hold_a_secret() -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "x", "MY_PASSWORD": "x"}
    kept = {"HOME": "/home/me", "PATH": "/bin", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "2"}
    assert environment_of_warm_process(secrets | kept) == kept


def test_a_message_arrives_with_its_files_however_long_it_is(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    message = {"environ": {"CODE": "x" * 3_000_000}}
    with (tmp_path / "file").open("w+") as file, here, there:
        sender = threading.Thread(target=messages.send, args=(here, message, [file.fileno()]))
        sender.start()
        received, (descriptor,) = messages.receive(there, 3)
        sender.join()
        assert received == message
        assert os.path.samestat(os.fstat(descriptor), os.fstat(file.fileno()))
        os.close(descriptor)


@pytest.mark.parametrize("sent", [b"", b"\x01", b"\x05\0\0\0{}"], ids=["nothing", "short", "cut"])
def test_a_message_that_is_cut_off_is_none(sent: bytes) -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(sent)
        with pytest.raises(EOFError):
            messages.receive(there)


def test_a_message_that_says_it_is_huge_is_not_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ValueError, match="4294967295 bytes"):
            messages.receive(there)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "trainyard"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(messages.WarmFolderError, match="its mode is not 700"):
        messages.connect(folder)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(messages.WarmFolderError, match="is not a folder of this user"):
        messages.connect(tmp_path / "link")


def test_the_socket_of_a_process_that_was_killed_counts_as_none(tmp_path: Path) -> None:
    folder = tmp_path / "trainyard"
    folder.mkdir(mode=0o700)
    assert messages.connect(folder) is None
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(messages.address(folder))
    assert messages.connect(folder) is None
