"""The cache of fetched folders on this machine, which all processes of the machine share.

    <temporary folder>/trainyard-models-<user>/
        <name>-<key>/              a whole folder; `<key>` follows from address, identity and wanted files
            .fetched.json          names, sizes and SHA-256 of its files; its time is that of the last check
        <name>-<key>.part/         a folder that is being fetched, and below .incomplete/ its unfinished files
        <name>-<key>.lock          locked by the process that fetches or checks the folder

A folder gets its name when all of its files are there and checked. A killed fetch leaves files in `.part`
which the next one need not fetch again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from trainyard_trainer.config.location import HUB
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.fetching.bucket import BucketSource
from trainyard_trainer.fetching.hub import HubSource
from trainyard_trainer.fetching.source import RemoteFile, RemoteSource
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.storage import NO_ROOM, StorageFolder

RECORD = ".fetched.json"
PART = ".part"
INCOMPLETE = ".incomplete"

THREADS = 8
"""The number of files that are fetched at once."""

PROGRESS_S = 5.0
"""Seconds between two lines about the progress of a fetch."""

RECHECK_S = 600.0
"""Seconds for which a check of all SHA-256 counts, so that the workers of a node make one together."""

PATIENCE_S, POLL_S = 2.0, 0.05
"""Seconds before a process says that it waits for another one, and between two looks until then."""

Say = Callable[[str], None]
"""Prints a line about a fetch."""


def say_on_stderr(line: str) -> None:
    """Print a line where it is no part of a command's result."""
    print(line, file=sys.stderr, flush=True)


def source_of(address: str, endpoint: str | None, *, names: tuple[str, str]) -> RemoteSource:
    """Return the source at an address; `names` are the keys of address and endpoint. Raises ConfigError."""
    if address.startswith(HUB):
        return HubSource(address, names[0])
    return BucketSource(address.rstrip("/"), endpoint, names)


def fetched(source: RemoteSource, wanted: Sequence[str], say: Say) -> Path:
    """Return a folder with the files that match the patterns; what is missing of it is fetched.

    Of many processes of a machine one fetches, and the others wait. Raises TrainerError.
    """
    cache = Path(tempfile.gettempdir(), f"trainyard-models-{os.getuid()}")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = repr((source.identity(wanted), sorted(wanted)))
    key = hashlib.sha256(known.encode()).hexdigest()[:16]
    name = source.address.partition("@")[0].rpartition("/")[2]
    folder = cache / f"{name}-{key}"
    with _locked(folder.with_name(f"{folder.name}.lock"), source, say):
        if not _is_intact(folder, say):
            _fetch(source, wanted, folder, say)
    return folder


def sha256_of_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a fetched folder by its name, as it was when it was fetched."""
    record: Mapping[str, tuple[int, str]] = json.loads((folder / RECORD).read_text())
    return {name: sha256 for name, (_, sha256) in record.items()}


@contextmanager
def _locked(path: Path, source: RemoteSource, say: Say) -> Iterator[None]:
    """Hold the lock of a folder in the block. The system releases it when the process ends."""
    with path.open("w") as file:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_taken(file.fileno()):
            if time.monotonic() > deadline:
                say(
                    f"{source.address}: waiting for another process of this machine that fetches it"
                )
                fcntl.flock(file, fcntl.LOCK_EX)
                break
            time.sleep(POLL_S)
        yield


def _is_taken(lock: int) -> bool:
    """Take a lock without waiting. Return whether that worked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# A folder that is there.


def _is_intact(folder: Path, say: Say) -> bool:
    """Whether the folder is there with its bytes. One that is damaged becomes a part of the next fetch."""
    if not folder.is_dir():
        return False
    record = folder / RECORD
    known: Mapping[str, tuple[int, str]] = json.loads(record.read_text())
    checked = record.stat().st_mtime
    is_recent = time.time() - checked < RECHECK_S

    def is_wrong(name: str) -> bool:
        size, sha256 = known[name]
        path = folder / name
        if _size(path) != size:
            return True
        return not (is_recent and path.stat().st_mtime <= checked) and _sha256(path) != sha256

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [
            name for name, is_it in zip(known, pool.map(is_wrong, known), strict=True) if is_it
        ]
    if not wrong:
        os.utime(record)
        return True
    say(f"{folder}: {', '.join(wrong)} changed since the fetch, and will be fetched again")
    for name in wrong:
        (folder / name).unlink(missing_ok=True)
    record.unlink()
    part = folder.with_name(folder.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    folder.rename(part)
    return False


def _size(path: Path) -> int | None:
    """Return the size of a file; None if there is none."""
    return path.stat().st_size if path.is_file() else None


def _sha256(path: Path) -> str:
    return StorageFolder(fs.LocalFileSystem(), str(path.parent)).sha256(str(path))


# A folder that is fetched.


def _fetch(source: RemoteSource, wanted: Sequence[str], folder: Path, say: Say) -> None:
    """Fetch the files that are not there yet, and give the folder its name."""
    began = time.monotonic()
    files = _required_files(source, wanted)
    part = folder.with_name(folder.name + PART)
    shutil.rmtree(part / INCOMPLETE, ignore_errors=True)
    (part / INCOMPLETE).mkdir(mode=0o700, parents=True)
    total = sum(file.size for file in files)
    missing = sum(file.size for file in files if _size(part / file.name) != file.size)
    _require_room(source, missing, folder.parent)
    is_here = f", {size_text(total - missing)} of them are here already" if missing < total else ""
    say(f"{source.address}: fetching {size_text(total)} in {len(files)} files to {folder}{is_here}")
    with _progress(source, part, total, say):
        pool = ThreadPoolExecutor(THREADS)
        try:
            hashes = [*pool.map(lambda file: _fetch_file(source, file, part), files)]
        except OSError as error:
            if error.errno in NO_ROOM:
                _require_room(source, missing, folder.parent, free=0)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    if source.wanted_files(wanted) != files:
        shutil.rmtree(part)
        raise RunError(f"{source.address}: its files were changed while they were fetched")
    shutil.rmtree(part / INCOMPLETE)
    record = {file.name: (file.size, sha256) for file, sha256 in zip(files, hashes, strict=True)}
    (part / RECORD).write_text(json.dumps(record, indent=1))
    part.rename(folder)
    say(f"{source.address}: fetched in {time.monotonic() - began:.0f} s")


def _required_files(source: RemoteSource, wanted: Sequence[str]) -> list[RemoteFile]:
    """Return the wanted files. Raises ConfigError if there are none."""
    if files := source.wanted_files(wanted):
        return files
    names = sorted(file.name for file in source.files())
    raise ConfigError(
        f"{source.address} has {', '.join(names[:5]) if names else 'no files'}, and none of "
        f"{', '.join(wanted[:5])}. Check the address."
    )


def _fetch_file(source: RemoteSource, file: RemoteFile, part: Path) -> str:
    """Fetch a file unless it is there, and return its SHA-256. Raises RunError if other bytes have come."""
    path = part / file.name
    is_new = _size(path) != file.size
    if is_new:
        source.download(file, part / INCOMPLETE)
    new = part / INCOMPLETE / file.name if is_new else path
    size, sha256 = _size(new), _sha256(new)
    if size != file.size or file.sha256 not in (None, sha256):
        new.unlink()
        raise RunError(
            f"{source.address}: {file.name} has come with {size:,} bytes of SHA-256 {sha256[:12]}, and not "
            f"{file.size:,}{f' of {file.sha256[:12]}' if file.sha256 else ''}. Try again."
        )
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.rename(path)
    return sha256


def _require_room(source: RemoteSource, missing: int, cache: Path, free: int | None = None) -> None:
    """Raise ConfigError if the disk of the cache has no room for the missing bytes."""
    if free is None:
        free = shutil.disk_usage(cache).free
    if missing > free:
        raise ConfigError(
            f"{source.address} needs {size_text(missing)} in {cache}, and {size_text(free)} are free. "
            "Delete older models there, or set TMPDIR to a larger disk."
        )


@contextmanager
def _progress(source: RemoteSource, part: Path, total: int, say: Say) -> Iterator[None]:
    """Print every few seconds of the block how many bytes are there."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            sizes = (_size(path) for path in part.rglob("*"))
            done = min(sum(size or 0 for size in sizes), total)
            say(f"{source.address}: {size_text(done)} of {size_text(total)} fetched")

    thread = threading.Thread(target=report, name="fetch progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
