"""A disk that takes no more: a small one that is full, and the kernel's own limit on the size of a file."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attempts import PACKAGES, committed, read_json, read_records, wait_for
from training import small_config

from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, TrainerConfig
from trainyard_trainer.run_files.driver_output import FRONT_END_VARIABLE
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


# A whole run.

PROGRAM = """
import sys
from trainyard_trainer import storage
storage.PATIENCE_S = 1.0
from trainyard_trainer.program import main
sys.exit(main(["--without-ray"]))
"""
"""The training program, which waits only a second for room."""


def start(config: TrainerConfig, limit: int | None = None) -> subprocess.Popen[str]:
    """Start an attempt as `trainyard train` does; with a limit, no file that it writes may be larger."""

    def set_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {
        CONFIG_VARIABLE: config.model_dump_json(),
        FRONT_END_VARIABLE: str(os.getpid()),
        "PYTHONPATH": str(PACKAGES),
        "OMP_NUM_THREADS": "1",
    }
    open_pipe, _ = os.pipe()  # its end would be that of the command
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM],
        env=os.environ | environment,
        stdin=open_pipe,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=set_limit,
    )


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Wait for the end of an attempt and return what it printed."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB, on which only this test writes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={16 * ROOM}", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(file: Path) -> None:
    """Write to a file until the disk takes no more."""
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(2**12))


@pytest.mark.ci
def test_a_run_whose_disk_is_full_names_path_and_remedy_and_goes_on_when_there_is_room(
    small_disk: Path,
) -> None:
    config = small_config(small_disk, train__epochs=30)
    process = start(config)
    assert wait_for(lambda: committed(config), 60), finish(process, 0)
    fill(small_disk / "other-file")
    output = finish(process, 1)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        rf"error: storage: {small_disk}/small/(checkpoints|metrics|progress|tensorboard)\S* "
        r"cannot be (written|created): No space left on device\. "
        r"Make room on this disk, or enlarge it\.",
        error,
    )
    assert "storage: trying again for 1 s: " in output
    # What the failed write gave back may be enough for the summary.
    is_recorded = (small_disk / "small/summary.json").exists()
    is_told = f"has no record of the error: {small_disk}/small/" in output
    assert is_recorded or is_told
    (small_disk / "other-file").unlink()
    finish(start(config), 0)
    summary = read_json(config, "summary.json")
    assert (summary["outcome"], summary["attempts"], summary["epochs"]) == ("succeeded", 2, 30)
    assert summary["resumed_from"] is not None
    ends = [line for line in read_records(config, "metrics.jsonl") if line["kind"] == "epoch"]
    assert [line["epoch"] for line in ends] == list(range(1, 31))


@pytest.mark.ci
def test_a_checkpoint_that_is_too_large_for_a_file_is_explained_and_written_later(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    finish(start(config, limit=ROOM), 1)
    stderr = (tmp_path / "small" / "ray.log").read_text()
    (error,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert "/small/checkpoints/" in error
    assert "cannot be written: File too large. Make room on this disk, or enlarge it." in error
    assert read_json(config, "summary.json")["error"] == error.removeprefix("error: ")
    finish(start(config), 0)
    assert read_json(config, "summary.json")["attempts"] == 2
