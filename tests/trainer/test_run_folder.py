"""The run's folder on a disk and on an object store, and its reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import fs

from trainer.errors import ConfigError
from trainer.folder import NOT_FOUND, RunFolder


def write_half(folder: RunFolder, path: str) -> None:
    with folder.writing(path) as stream:
        stream.write(b"half of")
        raise RuntimeError


def test_what_is_written_is_read(folder: RunFolder) -> None:
    folder.write(folder.progress, "one")
    folder.write(folder.progress, b"two")
    assert folder.read(folder.progress) == b"two"
    assert folder.files() == ["progress.json"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    folder.write(folder.progress, "before")
    with pytest.raises(RuntimeError):
        write_half(folder, folder.progress)
    assert folder.read(folder.progress) == b"before"
    folder.sweep()
    assert folder.files() == ["progress.json"]


def test_a_failed_write_puts_no_half_object(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError):
        write_half(folder, folder.model)
    assert not folder.exists(folder.model)


def test_lines_are_appended(folder: RunFolder) -> None:
    folder.append(folder.metrics, "one\n")
    folder.append(folder.metrics, "two\n")
    assert folder.read(folder.metrics) == b"one\ntwo\n"


def test_files_are_copied_and_folders_deleted(folder: RunFolder) -> None:
    folder.write(folder.log(1), "text")
    folder.copy(folder.log(1), folder.log(2))
    assert folder.files() == ["logs/attempt-1.log", "logs/attempt-2.log"]
    folder.delete(f"{folder.root}/logs")
    folder.delete(f"{folder.root}/logs")
    assert folder.files() == []


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("gs://bucket", None), ("s3://bucket", "minio:9000"), ("s3://b", "ftp://m")],
)
def test_a_storage_that_is_no_storage_is_refused(path: str, endpoint: str | None) -> None:
    with pytest.raises(ConfigError, match=r"storage\.(path|endpoint) = "):
        RunFolder.open(path, "small", endpoint)


def test_s3_paths_keep_bucket_and_prefix() -> None:
    folder = RunFolder.open("s3://bucket/runs/", "small", "http://127.0.0.1:9000")
    assert isinstance(folder.filesystem, fs.S3FileSystem)
    assert folder.summary == "bucket/runs/small/summary.json"
    assert folder.show(folder.summary) == "s3://bucket/runs/small/summary.json"


def read(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "trainer.folder", *arguments]
    return subprocess.run(command, capture_output=True, check=False)


def test_the_reader_prints_a_file_byte_for_byte_and_lists_the_rest(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    data = bytes(range(256)) * 10
    folder.write(folder.model, data)
    folder.write(folder.summary, "{}")
    assert read("--path", str(tmp_path), "small", "model.pt").stdout == data
    assert read("--path", str(tmp_path), "small").stdout == b"model.pt\nsummary.json\n"


@pytest.mark.parametrize("arguments", [["no-run"], ["small", "summary.json"]])
def test_the_reader_says_in_one_line_what_is_missing(tmp_path: Path, arguments: list[str]) -> None:
    RunFolder.open(str(tmp_path), "small").write(f"{tmp_path}/small/run.json", "{}")
    answer = read("--path", str(tmp_path), *arguments)
    assert answer.returncode == NOT_FOUND
    assert answer.stdout == b""
    assert answer.stderr.startswith(b"error: ")
    assert answer.stderr.count(b"\n") == 1


def test_the_reader_stays_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for file in ("../secret", str(tmp_path / "secret")):
        answer = read("--path", str(tmp_path), "small", file)
        assert answer.returncode == 2
        assert b"must lie below PATH" in answer.stderr
