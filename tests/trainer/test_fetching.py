"""Folders that are fetched from a bucket or from a hub into the cache of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_server import Bucket

pytest.importorskip("huggingface_hub")

from tests.support.hub_server import TOKEN, Hub, commit_of, running_hub
from trainyard_trainer.errors import ConfigError, RunError, TrainerError
from trainyard_trainer.fetching import node_cache
from trainyard_trainer.fetching.hub import HubSource
from trainyard_trainer.fetching.node_cache import fetched, sha256_of_files, source_of
from trainyard_trainer.storage import StorageFolder, open_filesystem

NAMES = ("train.model.path", "train.model.endpoint")
WANTED = ("config.json", "*.safetensors", "templates/*.jinja")
HUB_ADDRESS = "hf://org/tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache of this test alone."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return temporary / f"trainyard-models-{os.getuid()}"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with files of a model, and files that nobody wants."""
    folder = tmp_path / "model"
    (folder / "templates").mkdir(parents=True)
    for name, size in {
        "config.json": 100, "a.safetensors": 300_000, "b.safetensors": 5_000, "model.bin": 9, "code.py": 9,
        "templates/chat.jinja": 50,
    }.items():  # fmt: skip
        (folder / name).write_bytes(os.urandom(size))
    return folder


def uploaded(bucket: Bucket, folder: Path) -> str:
    """Upload a folder to a new place in the bucket, and return its address."""
    address = f"{bucket.path}/{uuid.uuid4().hex}/tiny"
    filesystem, root = open_filesystem(address, bucket.endpoint)
    for file in folder.rglob("*"):
        if file.is_file():
            StorageFolder(filesystem, root).upload(file, f"{root}/{file.relative_to(folder)}")
    return address


@pytest.fixture(params=["s3", "hub"])
def address(request: pytest.FixtureRequest, model: Path, cache: Path) -> tuple[str, str | None]:
    """Address and endpoint of the model in a bucket, and on the hub."""
    if request.param == "hub":
        request.getfixturevalue("hub").publish("org/tiny", model)
        return HUB_ADDRESS, None
    bucket = request.getfixturevalue("bucket")
    return uploaded(bucket, model), bucket.endpoint


def fetch(address: str, endpoint: str | None = None) -> tuple[Path, list[str]]:
    """Fetch the wanted files, and return their folder and what was said."""
    said: list[str] = []
    source = source_of(address, endpoint, names=NAMES)
    return fetched(source, WANTED, said.append), said


def test_the_wanted_files_are_fetched_once_and_checked(
    address: tuple[str, str | None], model: Path
) -> None:
    folder, said = fetch(*address)
    names = {"config.json", "a.safetensors", "b.safetensors", "templates/chat.jinja"}
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert found == names | {".fetched.json"}
    assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in names)
    assert sha256_of_files(folder).keys() == names
    assert "298 KiB in 4 files" in said[0]
    assert fetch(*address) == (folder, [])


@pytest.mark.parametrize("damage", ["bytes", "size", "gone"])
def test_a_damaged_file_is_noticed_and_fetched_again(
    address: tuple[str, str | None], model: Path, damage: str
) -> None:
    folder, _ = fetch(*address)
    file = folder / "b.safetensors"
    match damage:
        case "bytes":
            file.write_bytes(bytes(5_000))
        case "size":
            file.write_bytes(b"")
        case "gone":
            file.unlink()
    assert fetch(*address)[0] == folder
    assert file.read_bytes() == (model / "b.safetensors").read_bytes()


def test_damage_that_keeps_the_time_of_a_file_is_noticed_by_a_later_run(
    address: tuple[str, str | None], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = fetch(*address)
    file, before = folder / "b.safetensors", (folder / "b.safetensors").stat()
    file.write_bytes(bytes(5_000))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr(node_cache, "RECHECK_S", 0.0)
    _, said = fetch(*address)
    assert "b.safetensors changed since the fetch" in said[0]
    assert file.read_bytes() == (model / "b.safetensors").read_bytes()


PROGRAM = f"""
import sys
from trainyard_trainer.fetching import node_cache
from trainyard_trainer.fetching.bucket import BucketSource
from trainyard_trainer.fetching.hub import HubSource

for source in (BucketSource, HubSource):
    download = source.download
    def slow(self, file, folder, download=download):
        if file.name == "b.safetensors":
            import time
            print("half", flush=True)
            time.sleep(float(sys.argv[3]))
        download(self, file, folder)
    source.download = slow
source = node_cache.source_of(sys.argv[1], sys.argv[2] or None, names=("path", "endpoint"))
print(node_cache.fetched(source, {WANTED!r}, lambda line: print(line, flush=True)), flush=True)
"""


def started(address: tuple[str, str | None], delay_s: float) -> subprocess.Popen[str]:
    """Start a process that fetches, and waits before its last file."""
    arguments = [address[0], address[1] or "", str(delay_s)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_a_killed_fetch_leaves_no_folder_and_the_next_one_goes_on(
    address: tuple[str, str | None], cache: Path
) -> None:
    process = started(address, 60)
    assert process.stdout
    assert any(line == "half\n" for line in process.stdout)
    deadline = time.monotonic() + 20
    while not [*cache.glob("*.part/a.safetensors")] and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [each.suffix for each in cache.iterdir() if each.is_dir()] == [".part"]
    folder, said = fetch(*address)
    assert "of them are here already" in said[0]
    assert (folder / "b.safetensors").stat().st_size == 5_000
    assert [each for each in cache.iterdir() if each.is_dir()] == [folder]


def test_of_two_processes_one_fetches_and_the_other_waits(
    address: tuple[str, str | None],
) -> None:
    processes = [started(address, 1.0) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("fetching" in output for output in outputs) == [False, True]
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_changed_object_is_another_folder(bucket: Bucket, model: Path, cache: Path) -> None:
    address = uploaded(bucket, model)
    before, _ = fetch(address, bucket.endpoint)
    filesystem, root = open_filesystem(address, bucket.endpoint)
    time.sleep(1.1)  # a server may keep whole seconds
    StorageFolder(filesystem, root).write(f"{root}/config.json", bytes(100))
    after, _ = fetch(address, bucket.endpoint)
    assert after != before
    assert (after / "config.json").read_bytes() == bytes(100)


def test_no_room_is_told_before_the_fetch(
    address: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    usage = shutil.disk_usage("/")._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"needs 298 KiB in .*, and 98 KiB are free"):
        fetch(*address)


# The hub.


def test_a_branch_is_resolved_to_its_commit_and_transfers_that_break_are_resumed(
    hub: Hub, model: Path
) -> None:
    commit = hub.publish("org/tiny", model)
    assert HubSource(HUB_ADDRESS, NAMES[0]).pinned == f"{HUB_ADDRESS}@{commit}"
    assert HubSource(f"{HUB_ADDRESS}@{commit}", NAMES[0]).pinned == f"{HUB_ADDRESS}@{commit}"
    hub.cuts = 2
    folder, _ = fetch(HUB_ADDRESS)
    assert (folder / "a.safetensors").read_bytes() == (model / "a.safetensors").read_bytes()
    sent = [name for name in hub.fetched if name.endswith(".safetensors")]
    assert len(sent) == 4, "each broken transfer is one more request"
    hub.publish("org/tiny", model, 2)
    assert fetch(f"{HUB_ADDRESS}@{commit}") == (folder, [])
    assert fetch(HUB_ADDRESS)[0] != folder


def _down(hub: Hub) -> None:
    hub.down = True


def _offline(hub: Hub) -> None:
    from huggingface_hub import constants

    hub.patch.setattr(constants, "HF_HUB_OFFLINE", True)  # type: ignore[attr-defined]


def _set(**values: object) -> Callable[[Hub], None]:
    return lambda hub: hub.__dict__.update(values)


@pytest.mark.parametrize(
    ("address", "spoil", "token", "kind", "message"),
    [
        ("hf://org/none", None, None, ConfigError, "shows no such model.*HF_TOKEN, which is not set"),
        ("hf://org/tiny@v9", None, None, ConfigError, "has no revision v9"),
        (f"hf://org/tiny@{commit_of(9)}", None, None, ConfigError, "has no revision 0000"),
        ("hf://org/a..b", None, None, ConfigError, "names no model"),
        (HUB_ADDRESS, _set(private=True), None, ConfigError, "HF_TOKEN, which is not set"),
        (HUB_ADDRESS, _set(private=True), "wrong", ConfigError, "a token in HF_TOKEN whose owner"),
        (HUB_ADDRESS, _set(gated=True), None, ConfigError, "is gated. Accept its terms at http"),
        (HUB_ADDRESS, _set(down=True), None, RunError, "has answered with 503"),
        (HUB_ADDRESS, _set(spoils=True), None, RunError, "has come with 5,000 bytes of SHA-256|300,000"),
        (HUB_ADDRESS, _offline, None, ConfigError, "HF_HUB_OFFLINE = 1 forbids"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_told_in_words(
    hub: Hub,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    spoil: Callable[[Hub], None] | None,
    token: str | None,
    kind: type[TrainerError],
    message: str,
) -> None:
    hub.publish("org/tiny", model)
    hub.patch = monkeypatch  # type: ignore[attr-defined]
    if spoil is not None:
        spoil(hub)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(kind, match=message) as refused:
        fetch(address)
    assert address in str(refused.value)
    assert type(refused.value) is kind


def test_a_hub_that_is_not_there_is_told_in_words(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9 cannot be reached: ConnectError"):
        fetch(HUB_ADDRESS)


def test_a_token_opens_private_and_gated_models(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("org/tiny", model)
    hub.private = hub.gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder, said = fetch(HUB_ADDRESS)
    assert folder.is_dir()
    assert TOKEN not in "".join(said)


@pytest.mark.parametrize("place", ["empty", "other files"])
def test_a_place_without_files_of_a_model_is_refused(
    bucket: Bucket, tmp_path: Path, cache: Path, place: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    if place == "other files":
        (folder / "photo.jpg").write_bytes(b"0")
    with pytest.raises(
        ConfigError, match="photo.jpg, and none" if place != "empty" else "no files"
    ):
        fetch(uploaded(bucket, folder), bucket.endpoint)
