"""The run's folder on a disk and on an object store, and its reader."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import obstore
import pytest
from attempts import wait_for
from pyarrow import fs
from s3_server import Bucket

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import PIECE
from trainyard_trainer.tools.folder import NOT_FOUND


def read(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "trainyard_trainer.tools.folder", *arguments]
    return subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)


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


def test_what_takes_several_requests_is_whole(folder: RunFolder) -> None:
    data = bytes(range(256)) * 2**16
    folder.write(folder.model, data)
    assert folder.size(folder.model) == len(data) == 2**24
    assert folder.read(folder.model) == data
    with folder.filesystem.open_input_file(folder.model) as file:
        assert file.read_at(300, 2**23) == data[2**23 : 2**23 + 300]


def test_folders_and_files_are_listed(folder: RunFolder) -> None:
    assert folder.subfolders(folder.checkpoints) == folder.file_names(folder.checkpoints) == []
    for name in ("b/model.pt", "a/model.pt", "note"):
        folder.write(f"{folder.checkpoints}/{name}", "")
    assert folder.subfolders(folder.checkpoints) == ["a", "b"]
    assert folder.file_names(folder.checkpoints) == ["note"]


MAKE_FOLDERS = """
import os, sys
for folder in map(str.rstrip, sys.stdin):
    os.mkdir(folder)
"""


def test_a_folder_that_is_made_while_it_is_listed_is_no_error(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    Path(folder.root).mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_FOLDERS], stdin=subprocess.PIPE, text=True, bufsize=1
    ) as maker:
        assert maker.stdin is not None
        for path in (f"{folder.root}/{number}" for number in range(1000)):
            maker.stdin.write(f"{path}\n")
            while not Path(path).is_dir():
                assert folder.subfolders(path) == []
        maker.stdin.close()


def test_files_are_copied_and_folders_deleted(folder: RunFolder) -> None:
    folder.write(folder.log(1), "text")
    folder.copy(folder.log(1), folder.log(2))
    assert folder.files() == ["logs/attempt-1.log", "logs/attempt-2.log"]
    folder.delete(f"{folder.root}/logs")
    folder.delete(f"{folder.root}/logs")
    assert folder.files() == []


# Files that only one of many can create.

RACE = """
import sys
from trainyard_trainer.run_folder.folder import RunFolder
path, endpoint, name = sys.argv[1:]
folder = RunFolder.open(path, "small", endpoint or None)
print("ready", flush=True)
for round in map(str.strip, sys.stdin):
    print(name if folder.create(f"{folder.lease}/{round}", name * 1000) else "", flush=True)
"""


@pytest.fixture
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard_trainer.storage.SETTLE_S", 0.0)


@pytest.mark.usefixtures("_no_rest")
def test_what_is_there_is_not_created_again(folder: RunFolder) -> None:
    assert folder.create(folder.run, "mine")
    assert not folder.create(folder.run, "another's")
    assert folder.create(folder.run, "mine"), "the answer to the first try may have been lost"
    assert folder.read(folder.run) == b"mine"
    assert folder.files() == ["run.json"]


def test_of_many_processes_one_creates_a_file(storage: tuple[str, str | None]) -> None:
    path, endpoint = storage
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, path, endpoint or "", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in "abcd"
    ]  # fmt: skip
    questions = [racer.stdin for racer in racers if racer.stdin]
    answers = [racer.stdout for racer in racers if racer.stdout]
    try:
        assert [answer.readline() for answer in answers] == ["ready\n"] * len(racers)
        folder = RunFolder.open(path, "small", endpoint)
        for number in range(30):
            for question in questions:
                question.write(f"{number}\n")
            for question in questions:
                question.flush()
            winner = "".join(answer.readline().strip() for answer in answers)
            assert len(winner) == 1
            assert folder.read(f"{folder.lease}/{number}") == (winner * 1000).encode()
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


@pytest.mark.parametrize("trouble", [PermissionError(1, "no links"), OSError(95, "not supported")])
def test_a_file_is_created_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: OSError
) -> None:
    def link(source: str, target: str) -> None:
        raise trouble

    monkeypatch.setattr(os, "link", link)
    folder = RunFolder.open(str(tmp_path), "small")
    assert folder.create(folder.run, "mine")
    assert not folder.create(folder.run, "another's")
    assert folder.files() == ["run.json"]


def test_a_sweep_meanwhile_does_not_keep_a_file_from_being_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    original = os.link

    def link(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", original)
        folder.sweep()
        original(source, target)

    monkeypatch.setattr(os, "link", link)
    assert folder.create(folder.run, "mine")


def test_a_store_is_asked_whether_it_can_refuse(folder: RunFolder) -> None:
    has_conditions = isinstance(folder.filesystem, fs.LocalFileSystem | fs.S3FileSystem)
    assert folder.exclusion_gap == (
        "" if has_conditions else "this storage has no conditional writes"
    )
    assert folder.files() == []


@pytest.mark.usefixtures("_no_rest")
def test_a_store_that_takes_conditions_and_ignores_them_is_found_out(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, key, data, mode: put(store, key, data))
    folder = RunFolder.open(f"{bucket.path}/careless", "small", bucket.endpoint)
    assert folder.exclusion_gap == "this store ignores the condition of a conditional write"
    assert folder.create(folder.run, "mine")
    assert not folder.create(folder.run, "another's")
    assert folder.files() == ["run.json"]


def test_a_store_that_refuses_conditions_is_told_with_its_reason(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(store: object, key: str, data: bytes, mode: str) -> None:
        raise obstore.exceptions.NotSupportedError("501 Not Implemented")

    monkeypatch.setattr(obstore, "put", put)
    folder = RunFolder.open(f"{bucket.path}/strict", "small", bucket.endpoint)
    assert folder.exclusion_gap.startswith("a conditional write failed: s3://bucket/strict/small/")
    assert "cannot be created: 501 Not Implemented. " in folder.exclusion_gap


# Where folders lie.


def test_a_file_is_its_bytes_whatever_its_name_says(folder: RunFolder) -> None:
    """pyarrow would pack and unpack by the ending of a name."""
    one, two = f"{folder.root}/a.tar.gz", f"{folder.root}/b.bz2"
    folder.write(one, b"no archive")
    folder.copy(one, two)
    assert folder.read(one) == folder.read(two) == b"no archive"
    assert folder.size(one) == len(b"no archive")
    assert folder.sha256(two) == hashlib.sha256(b"no archive").hexdigest()
    folder.append(two, b" at all")
    assert folder.read(two) == b"no archive at all"


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


def test_the_reader_reads_from_s3(bucket: Bucket) -> None:
    folder = RunFolder.open(f"{bucket.path}/read", "small", bucket.endpoint)
    folder.write(folder.summary, "{}")
    place = ("--path", f"{bucket.path}/read", "--endpoint", bucket.endpoint, "small")
    assert read(*place).stdout == b"summary.json\n"
    assert read(*place, "summary.json").stdout == b"{}"
    assert read(*place, "model.pt").returncode == NOT_FOUND


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


def test_the_reader_packs_a_file_a_folder_or_the_whole_and_tells_the_sum(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    data = bytes(range(256)) * 4096
    folder.write(f"{folder.checkpoints}/s1/model.pt", data)
    folder.write(folder.summary, "{}")
    for wanted, names in {
        "checkpoints/s1": {"model.pt"},
        "checkpoints/": {"s1/model.pt"},
        "summary.json": {"summary.json"},
        "": {"summary.json", "checkpoints/s1/model.pt"},
    }.items():
        answer = read("--path", str(tmp_path), "--archive", "small", *filter(None, [wanted]))
        assert answer.returncode == 0, answer.stderr
        told = f"sha256 {hashlib.sha256(answer.stdout).hexdigest()} {len(answer.stdout)}\n"
        assert answer.stderr.decode() == told
        with tarfile.open(fileobj=io.BytesIO(answer.stdout)) as archive:
            assert set(archive.getnames()) == names
            for name in names - {"summary.json"}:
                file = archive.extractfile(name)
                assert file is not None
                assert file.read() == data


def test_the_reader_ends_when_its_archive_has_arrived(tmp_path: Path) -> None:
    RunFolder.open(str(tmp_path), "small").write(f"{tmp_path}/small/run.json", "{}")
    command = [
        sys.executable,
        "-m",
        "trainyard_trainer.tools.folder",
        "--path",
        str(tmp_path),
        "--archive",
        "small",
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as reader:
        assert reader.stderr is not None
        assert reader.stderr.readline().startswith(b"sha256 ")
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.5)
        reader.communicate(b"\n")
        assert reader.returncode == 0


def test_the_reader_packs_nothing_that_is_not_there(tmp_path: Path) -> None:
    RunFolder.open(str(tmp_path), "small").write(f"{tmp_path}/small/run.json", "{}")
    answer = read("--path", str(tmp_path), "--archive", "small", "run")
    assert (answer.returncode, answer.stdout) == (NOT_FOUND, b"")


def test_the_reader_lists_files_with_their_bytes(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    folder.write(f"{folder.root}/run.json", "{}")
    folder.write(f"{folder.root}/logs/attempt-1.log", "three")
    answer = read("--path", str(tmp_path), "--sizes", "small")
    assert answer.stdout == b"5 logs/attempt-1.log\n2 run.json\n"
    assert read("--path", str(tmp_path), "--sizes", "small", "run.json").returncode == 2
    assert read("--path", str(tmp_path), "--sizes", "none").returncode == NOT_FOUND


def put(
    storage: tuple[str, str | None], data: bytes, length: int, sha256: str, file: str = "code/x.gz"
) -> subprocess.CompletedProcess[bytes]:
    path, endpoint = storage
    where = ("--path", path, *(("--endpoint", endpoint) if endpoint else ()))
    command = [
        sys.executable,
        "-m",
        "trainyard_trainer.tools.folder",
        *where,
        "--put",
        f"{length}",
        sha256,
    ]
    return subprocess.run([*command, "small", file], input=data, capture_output=True, check=False)


def test_a_file_is_written_from_standard_input_whole_or_not_at_all(
    storage: tuple[str, str | None],
) -> None:
    data = os.urandom(3 * PIECE + 1)
    sha256 = hashlib.sha256(data).hexdigest()
    folder = RunFolder.open(storage[0], "small", storage[1])
    cut, changed = (
        put(storage, data[:-1], len(data), sha256),
        put(storage, data[::-1], len(data), sha256),
    )
    for answer in (cut, changed):
        assert answer.returncode == 1
        assert answer.stderr.startswith(b"error: code/x.gz of run small was not written: ")
    assert b"786,432 bytes of SHA-256" in cut.stderr
    assert folder.files() == []
    for _ in range(2):
        answer = put(storage, data + b"what follows", len(data), sha256)
        assert answer.returncode == 0, answer.stderr
        told = [int(line) for line in answer.stdout.split()]
        assert told == [0, PIECE, 2 * PIECE, 3 * PIECE, len(data)]
    assert folder.files() == ["code/x.gz"]
    assert folder.read(f"{folder.root}/code/x.gz") == data


def test_a_writer_that_is_killed_leaves_no_file_but_one_that_is_swept(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "trainyard_trainer.tools.folder",
        "--path",
        str(tmp_path),
        "--put",
        "9",
        "0" * 64,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "small", "code/x"], stdin=pipe, stdout=pipe) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"0\n"
        (aside,) = wait_for(lambda: [*tmp_path.rglob("x.*")], 10)
        writer.kill()
    folder = RunFolder.open(str(tmp_path), "small")
    assert folder.files() == [f"code/{aside.name}"]
    folder.sweep()
    assert folder.files() == []


@pytest.mark.parametrize("words", [("--put", "x", "0"), ("--put", "1")])
def test_a_file_that_is_written_has_a_length_and_a_sum(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert read("--path", str(tmp_path), *words, "small", "x").returncode == 2


def test_the_reader_removes_one_run_and_no_other(tmp_path: Path) -> None:
    for name in ("small", "small-2"):
        RunFolder.open(str(tmp_path), name).write(f"{tmp_path}/{name}/run.json", "{}")
    known = hashlib.sha256((tmp_path / "small" / "run.json").read_bytes()).hexdigest()
    assert (
        read("--path", str(tmp_path), "--sum", "small", "run.json").stdout.strip() == known.encode()
    )
    assert read("--path", str(tmp_path), "--sum", "small", "nothing").returncode == NOT_FOUND
    assert read("--path", str(tmp_path), "--sum", "small").returncode == 2
    assert read("--path", str(tmp_path), "--delete", "small", "run.json").returncode == 2
    assert read("--path", str(tmp_path), "--delete", "small").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["small-2"]
    assert read("--path", str(tmp_path), "--delete", "small").returncode == NOT_FOUND
