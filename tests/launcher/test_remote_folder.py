"""A run's folder through a pod: whole, checked, and the pod goes again."""

from __future__ import annotations

import hashlib
import io
import json
import random
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, FakeProcess, LocalProcess
from hypothesis import event, given

from tests.random_archives import (
    Entry,
    damages,
    entries,
    files_in,
    files_of,
    nothing_but_files_below,
    packed_from,
)
from trainyard.errors import ClusterError, ConfigError
from trainyard.platform import Platform
from trainyard.submission.run_folder.reader_pod import open_folder, reader_pod
from trainyard.submission.run_folder.remote_folder import RemoteFolder
from trainyard.submission.run_folder.transfer import MAX_UNCONFIRMED_BYTES
from trainyard.submission.workers import WorkerLocation, locate_worker
from trainyard_trainer.run_files.programs.isolation import IN_PODS

Object = dict[str, Any]


class Readers(FakeCluster):
    """A cluster whose reader pods are in this state at once."""

    def __init__(self, state: Object, *processes: FakeProcess) -> None:
        super().__init__()
        self.state = state
        self.processes = list(processes)

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        status = {"containerStatuses": [{"name": "reader", "state": self.state}]}
        return super().create(body | {"status": status})


RUNNING: Object = {"running": {}}


def archive(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def sent(packed: bytes) -> FakeProcess:
    """What the folder's program says when it sends an archive."""
    told = f"sha256 {hashlib.sha256(packed).hexdigest()} {len(packed)}\n"
    return FakeProcess(packed, told)


@pytest.mark.parametrize("read", ["{}", None])
def test_a_file_is_read_by_a_pod_that_goes_again(platform: Platform, read: str | None) -> None:
    there = sent(archive(**{"summary.json": b"{}"}))
    cluster = Readers(RUNNING, there if read else FakeProcess(errors="no file", exit_code=4))
    with open_folder(cluster, platform, "digits") as folder:
        assert folder.read("summary.json") == read
    assert cluster.objects == {}
    ((_, *command),) = cluster.commands
    start = [*IN_PODS, "trainyard_trainer.tools.folder", "--path", "/mnt/trainyard"]
    assert command[: len(start)] == start
    assert command[-2:] == ["digits", "summary.json"]


def test_a_reader_that_fails_tells_its_last_lines(platform: Platform) -> None:
    cluster = Readers(RUNNING, FakeProcess(errors="Traceback\nPermissionError: /mnt", exit_code=1))
    with (
        pytest.raises(ClusterError, match="failed") as raised,
        open_folder(cluster, platform, "digits") as folder,
    ):
        folder.read("summary.json")
    assert "PermissionError: /mnt" in str(raised.value)
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"waiting": {}}, "has not started after 300 s"),
        ({"terminated": {"reason": "StartError"}}, "ended at once: StartError"),
    ],
)
def test_a_reader_that_does_not_start_is_removed_and_named(
    platform: Platform, state: Object, message: str
) -> None:
    cluster = Readers(state)
    now = iter(range(0, 10_000, 50))
    opening = open_folder(
        cluster, platform, "digits", clock=lambda: float(next(now)), sleep=lambda _: None
    )
    with pytest.raises(ClusterError, match=message), opening:
        pytest.fail("the reader has not started")
    assert cluster.objects == {}


def test_a_running_head_is_reader_enough(platform: Platform) -> None:
    cluster = FakeCluster()
    cluster.processes = [FakeProcess(b"run.json\nlogs/attempt-2.log\nlogs/attempt-10.log\n")]
    with open_folder(cluster, platform, "digits", "the-head") as folder:
        assert folder.logs() == [2, 10]
    assert cluster.commands[0][0] == "the-head"
    assert cluster.calls == []


def test_the_reader_pod_has_the_platform_s_image_and_ends_by_itself(platform: Platform) -> None:
    pod = reader_pod(platform, "digits")
    (container,) = pod["spec"]["containers"]
    assert container["image"] == platform.image
    assert pod["spec"]["activeDeadlineSeconds"] == 3600


def copying(platform: Platform, process: FakeProcess) -> RemoteFolder:
    cluster = FakeCluster()
    cluster.processes = [process]
    return RemoteFolder(cluster, platform, "digits", "pod", "reader")


EVERY_BYTE = bytes(range(256)) * 200


def test_a_file_is_copied_byte_for_byte(platform: Platform, tmp_path: Path) -> None:
    packed = archive(**{"model.pt": EVERY_BYTE})
    process = sent(packed)
    copying(platform, process).copy("model.pt", tmp_path / "mine.pt")
    assert (tmp_path / "mine.pt").read_bytes() == EVERY_BYTE
    assert process.read == b"\n"  # it waits until it is told that all has come
    copying(platform, sent(packed)).copy("a/model.pt", tmp_path)
    assert (tmp_path / "model.pt").read_bytes() == EVERY_BYTE


def test_a_folder_is_copied_with_all_below_it(platform: Platform, tmp_path: Path) -> None:
    packed = archive(**{"one": b"1", "deep__two": EVERY_BYTE})
    written = copying(platform, sent(packed)).copy("checkpoints", tmp_path / "new")
    assert {path.relative_to(tmp_path / "new") for path in written} == {
        Path("one"),
        Path("deep/two"),
    }
    assert (tmp_path / "new/deep/two").read_bytes() == EVERY_BYTE


def test_bytes_that_were_lost_or_changed_are_noticed(platform: Platform, tmp_path: Path) -> None:
    packed = archive(x=EVERY_BYTE)
    other = FakeProcess(packed, f"sha256 0 {len(packed)}\n")
    with pytest.raises(ClusterError, match="is not what was sent"):
        copying(platform, other).copy("x", tmp_path / "x")
    with pytest.raises(ClusterError, match="broke off"):
        copying(platform, FakeProcess(packed[:9000])).copy("x", tmp_path / "x")


def test_what_is_not_there_cannot_be_copied(platform: Platform, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run digits has no x"):
        copying(platform, FakeProcess(errors="error: no file x\n", exit_code=4)).copy(
            "x", tmp_path / "x"
        )


def hostile(entry: tarfile.TarInfo) -> FakeProcess:
    """What an image of somebody else's may send: the entry, behind a file that is harmless."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        tar.addfile(tarfile.TarInfo("harmless"), io.BytesIO())
        tar.addfile(entry, io.BytesIO(bytes(entry.size) if entry.isfile() else b""))
    return sent(packed.getvalue())


def entry_of(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


@pytest.mark.parametrize(
    "entry",
    [
        entry_of("../x"),
        entry_of("a/../../x"),
        entry_of("/x"),
        entry_of("x", tarfile.SYMTYPE, "/etc/passwd"),
        entry_of("x", tarfile.LNKTYPE, "harmless"),
        entry_of("x", tarfile.CHRTYPE),
        entry_of("x", tarfile.BLKTYPE),
        entry_of("x", tarfile.FIFOTYPE),
        entry_of("x", tarfile.DIRTYPE),
    ],
    ids=lambda entry: f"{entry.name} {entry.type!r}",
)
def test_an_archive_holds_plain_files_that_stay_below_the_target(
    platform: Platform, tmp_path: Path, entry: tarfile.TarInfo
) -> None:
    target = tmp_path / "target"
    with pytest.raises(ClusterError, match="which is not a plain file of a run"):
        copying(platform, hostile(entry)).copy("", target)
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "harmless"]


def test_a_file_with_holes_is_refused_before_it_fills_the_disk(
    platform: Platform, tmp_path: Path
) -> None:
    """GNU's sparse format: a terabyte of which no byte is sent."""
    header = bytearray(entry_of("bomb", tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % 2**32  # the size that it has unpacked
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    bomb = bytes(header) + bytes(2 * tarfile.BLOCKSIZE)
    with tarfile.open(fileobj=io.BytesIO(bomb)) as archive:
        assert [entry.issparse() for entry in archive] == [True]
    with pytest.raises(ClusterError, match="which is not a plain file of a run"):
        copying(platform, sent(bomb)).copy("", tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(entries=entries, damage=damages)
def test_whatever_an_archive_holds_files_below_the_target_are_written_or_it_is_refused(
    platform: Platform,
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[Entry],
    damage: tuple[int, int] | None,
) -> None:
    place = tmp_path_factory.mktemp("place")
    archive = packed_from(entries, damage, place)
    with nothing_but_files_below(place) as target:
        try:
            copying(platform, sent(archive)).copy("", target)
        except (ClusterError, ConfigError):
            event("refused")
        else:
            event("unpacked")
            assert files_in(target) == files_of(archive)


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("harmless/x", ConfigError, "cannot be written"),
        ("a\0b", ClusterError, "which is not a plain file of a run"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused(
    platform: Platform, tmp_path: Path, name: str, error: type[Exception], problem: str
) -> None:
    strange = entry_of("strange")
    strange.pax_headers = {"path": name}
    with pytest.raises(error, match=problem):
        copying(platform, hostile(strange)).copy("", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["harmless"]


def test_a_file_that_does_not_fit_is_refused_by_the_size_that_it_announces(
    platform: Platform, tmp_path: Path
) -> None:
    entry = entry_of("huge")
    entry.size = 2**60
    bomb = entry.tobuf(tarfile.GNU_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)
    with pytest.raises(ClusterError, match=r"huge has 1,152,921,504,606,846,976 bytes"):
        copying(platform, sent(bomb)).copy("", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


# Writing a file, by the program that does so in a pod.


class Here(FakeCluster):
    """A cluster in which each command runs on this machine, over a folder of it."""

    def __init__(self, storage: Path) -> None:
        super().__init__()
        self.storage = storage

    def execute(
        self, pod: str, container: str, command: Sequence[str], *, stdin: bool = False
    ) -> LocalProcess:
        here = [str(self.storage) if word == "/mnt/trainyard" else word for word in command[1:]]
        return LocalProcess([sys.executable, *here])


@pytest.mark.parametrize("size", [0, 1, 3 * MAX_UNCONFIRMED_BYTES + 7])
def test_a_file_arrives_whole_and_how_much_has_come_is_told(
    platform: Platform, tmp_path: Path, size: int
) -> None:
    data, told = random.Random(size).randbytes(size), list[int]()
    folder = RemoteFolder(Here(tmp_path), platform, "own", "pod", "reader")
    sha256 = hashlib.sha256(data).hexdigest()
    folder.put("code/x.tar.gz", data, sha256, told.append)
    assert (tmp_path / "own/code/x.tar.gz").read_bytes() == data
    assert (told[0], told[-1]) == (0, size)
    assert told == sorted(told)


def test_a_file_that_is_not_what_was_sent_does_not_appear(
    platform: Platform, tmp_path: Path
) -> None:
    folder = RemoteFolder(Here(tmp_path), platform, "own", "pod", "reader")
    with pytest.raises(ClusterError, match="could not be written") as error:
        folder.put("code/x.tar.gz", b"data", "0" * 64)
    assert "4 bytes of SHA-256 3a6eb079" in str(error.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_storage_that_takes_nothing_is_told_by_its_error(
    platform: Platform, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("a file in place of the folder")
    folder = RemoteFolder(Here(tmp_path), platform, "own", "pod", "reader")
    with pytest.raises(ClusterError, match="Not a directory"):
        folder.put("code/x.tar.gz", bytes(2 * MAX_UNCONFIRMED_BYTES), "0" * 64)


# Which pod has which rank.

WORKERS = [
    {"rank": rank, "node": f"pod-{rank}", "process": 7, "ray_worker": f"w{rank}"} for rank in (1, 0)
]


def with_pod(name: str, run: str) -> FakeCluster:
    cluster = FakeCluster()
    labels = {"app.kubernetes.io/managed-by": "trainyard", "trainyard.io/run": run}
    spec = {"containers": [{"name": "ray-worker"}]}
    cluster.objects["Pod", name] = {"metadata": {"name": name, "labels": labels}, "spec": spec}
    return cluster


def test_a_rank_is_found_in_its_pod() -> None:
    place = locate_worker(with_pod("pod-0", "digits"), "digits", WORKERS, 0)
    assert place == WorkerLocation(pod="pod-0", container="ray-worker", ray_worker="w0", process=7)


@pytest.mark.parametrize(
    ("workers", "rank", "message"),
    [
        (WORKERS, 2, "Its workers have the ranks 0 to 1"),
        ([], 0, "have not started yet"),
        (WORKERS, 1, "pod-1, which is gone"),
    ],
)
def test_a_rank_that_cannot_be_found_is_explained(
    workers: list[Object], rank: int, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        locate_worker(with_pod("pod-0", "digits"), "digits", workers, rank)
    assert message in str(raised.value)


def test_a_pod_of_that_name_that_is_another_run_s_is_not_entered() -> None:
    with pytest.raises(ConfigError, match="which is gone"):
        locate_worker(with_pod("pod-0", "other"), "digits", WORKERS, 0)


def test_workers_are_read_from_the_folder(platform: Platform) -> None:
    cluster = FakeCluster()
    workers = json.dumps({"workers": WORKERS}).encode()
    cluster.processes = [sent(archive(**{"workers.json": workers}))]
    assert RemoteFolder(cluster, platform, "digits", "pod", "c").workers() == WORKERS


@pytest.mark.parametrize(("said", "name"), [(b"digits-old-1\n", "digits-old-1"), (b"", None)])
def test_a_folder_that_is_set_aside_has_another_name(
    platform: Platform, said: bytes, name: str | None
) -> None:
    cluster = FakeCluster()
    cluster.processes = [FakeProcess(said, "lease: waiting\n")]
    assert RemoteFolder(cluster, platform, "digits", "pod", "c").set_aside() == name


def test_a_folder_that_cannot_be_set_aside_is_an_error_with_the_reason(platform: Platform) -> None:
    cluster = FakeCluster()
    cluster.processes = [FakeProcess(errors="error: it is being trained already\n", exit_code=1)]
    with pytest.raises(ClusterError, match="it is being trained already"):
        RemoteFolder(cluster, platform, "digits", "pod", "c").set_aside()
