"""The probe proves that a pod can work, on a disk and in a bucket, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from tests.trainer.s3_server import CREDENTIALS, Bucket, running_bucket
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools.pods import probe

OK = {"write": "ok", "read": "ok", "list": "ok", "delete": "ok"}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with pytest.MonkeyPatch.context() as patch, running_bucket(tmp_path_factory.mktemp("s3")) as it:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield it


def test_a_folder_that_can_be_used_is_empty_afterwards(tmp_path: Path) -> None:
    assert probe.try_storage(str(tmp_path), None) == OK
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_can_be_used_is_empty_afterwards(bucket: Bucket) -> None:
    assert probe.try_storage(f"{bucket.path}/runs", bucket.endpoint) == OK
    filesystem, root = open_filesystem(bucket.path, bucket.endpoint)
    left = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    assert [info.path for info in left if info.type == fs.FileType.File] == []


def test_a_bucket_that_is_not_there_is_said(bucket: Bucket) -> None:
    (step, said), *more = probe.try_storage("s3://no-bucket/runs", bucket.endpoint).items()
    assert (step, more) == ("write", [])
    assert "NO_SUCH_BUCKET" in said


def test_a_path_that_is_no_storage_is_said() -> None:
    assert "neither a folder" in probe.try_storage("ftp://host/runs", None)["open"]


def test_a_path_that_is_a_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "ok" not in probe.try_storage(str(file), None)["write"]


def test_one_line_of_json_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "NEEDED", ("sh",))
    assert probe.main(["--path", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line.removeprefix("probe "))
    assert {"python", "ray", "torch"} <= found["versions"].keys()
    monkeypatch.setattr(probe, "NEEDED", ("no-such-program",))
    assert probe.main(["--path", str(tmp_path)]) == 1
