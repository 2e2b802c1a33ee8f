"""What several tests of the trainer start from."""

from __future__ import annotations

import io
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts
from fsspec.implementations.memory import MemoryFileSystem
from own_recipes import EXAMPLES
from pyarrow import fs
from s3_server import CREDENTIALS, Bucket, running_bucket

from trainyard_trainer.run_files.programs import code_imports
from trainyard_trainer.run_folder.folder import RunFolder


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    """Starts attempts at runs below the test's own folder, forked from a process with their packages."""
    started = Attempts(tmp_path, is_forked=True)
    yield started
    started.clear()


@pytest.fixture
def fresh_attempts(tmp_path: Path) -> Iterator[Attempts]:
    """Do as `attempts`, but start each process as users start it: for tests of the start itself."""
    started = Attempts(tmp_path)
    yield started
    started.clear()


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A bucket of a real S3 server, and in the environment what opens it."""
    with (
        running_bucket(tmp_path_factory.mktemp("s3")) as bucket,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield bucket


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str | None]:
    """Path and endpoint of a place that other processes can open, too."""
    if request.param == "disk":
        return str(tmp_path), None
    bucket = request.getfixturevalue("bucket")
    return f"{bucket.path}/{uuid.uuid4().hex}", bucket.endpoint


class Objects(MemoryFileSystem):
    """A store with little to offer: no rename, no append, no conditional writes.

    Whoever reads has a place of their own in the file: fsspec's readers share one, and a lease is read by
    two threads.
    """

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, io.BytesIO] = {}
        self.pseudo_dirs = [""]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> io.BytesIO:
        file: io.BytesIO = super()._open(path, mode, **kwargs)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file


@pytest.fixture(params=["disk", "objects", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    """A run's folder on each kind of storage: a disk, a store with little to offer, an S3 server."""
    if request.param == "disk":
        return RunFolder.open(str(tmp_path), "small")
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        return RunFolder.open(f"{bucket.path}/{uuid.uuid4().hex}", "small", bucket.endpoint)
    return RunFolder(fs.PyFileSystem(fs.FSSpecHandler(Objects())), "/bucket/small")


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new object is read back at once: no test has a second writer in that moment."""
    monkeypatch.setattr("trainyard_trainer.storage.SETTLE_S", 0.0)


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user's code, and the examples, whose modules are importable in this process."""
    folder = tmp_path / "code"
    folder.mkdir()
    before, modules = (list(sys.meta_path), list(sys.path)), set(sys.modules)
    code_imports.install([str(folder), str(EXAMPLES)])
    yield folder
    sys.meta_path[:], sys.path[:] = before
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith((str(folder), str(EXAMPLES))):
            del sys.modules[name]
