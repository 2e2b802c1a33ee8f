"""What an operation on the storage says when it fails."""

from __future__ import annotations

import errno
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_server import Bucket

from trainyard_trainer.errors import MissingFileError, RunError, StorageError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import Lease


@pytest.fixture
def blocked(tmp_path: Path) -> RunFolder:
    """A run's folder in whose place lies a file."""
    (tmp_path / "small").write_text("")
    return RunFolder.open(str(tmp_path), "small")


@pytest.mark.parametrize(
    ("operation", "participle"),
    [
        (lambda folder: folder.read(folder.run), "read"),
        (lambda folder: list(folder.chunks(folder.run)), "read"),
        (lambda folder: folder.sha256(folder.run), "read"),
        (lambda folder: folder.copy(folder.run, f"{folder.root}-copy"), "read"),
        (lambda folder: folder.write(folder.run, ""), "written"),
        (lambda folder: folder.append(folder.run, ""), "written"),
        (lambda folder: folder.create(folder.run, ""), "created"),
        (lambda folder: folder.move(folder.run, f"{folder.root}-moved"), "moved"),
    ],
)
def test_an_operation_that_fails_names_itself_its_path_the_cause_and_a_remedy(
    blocked: RunFolder, operation: Callable[[RunFolder], object], participle: str
) -> None:
    with pytest.raises(StorageError) as raised:
        operation(blocked)
    said = str(raised.value)
    assert said.startswith(f"storage: {blocked.run} cannot be {participle}: ")
    assert said.endswith("Remove the file that lies in the place of a folder, or use another path.")
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert isinstance(raised.value, RunError)


def test_a_missing_file_is_a_file_not_found_error_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        RunFolder.open(str(tmp_path), "small").read(f"{tmp_path}/small/run.json")
    assert type(raised.value) is MissingFileError


@pytest.mark.parametrize("kind", [StorageError, MissingFileError])
def test_an_error_is_the_same_in_another_process(kind: type[StorageError]) -> None:
    error = kind("/mnt/run.json cannot be read: Stale file handle.", errno.ESTALE)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno) == (kind, str(error), errno.ESTALE)


def test_an_error_of_who_writes_is_not_one_of_the_storage(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    with pytest.raises(BrokenPipeError), folder.writing(folder.model):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    assert folder.files() == []


def test_a_bucket_that_does_not_exist_is_named_by_the_first_operation_that_writes(
    bucket: Bucket,
) -> None:
    folder = RunFolder.open("s3://nowhere/runs", "digits", bucket.endpoint)
    with pytest.raises(StorageError, match=r"s3://nowhere/runs/digits") as raised:
        Lease.acquire(folder, print)
    assert re.search("NO_SUCH_BUCKET|NoSuchBucket", str(raised.value).splitlines()[0])
