"""The folder of a run: every file that it has, on any filesystem that pyarrow knows.

    python -m trainer.folder --path PATH [--endpoint URL]
        [--archive | --delete | --put LENGTH SHA256 | --sizes | --sum] NAME [FILE]

prints one file of the run NAME, or its SHA-256, or lists them all, on request with their sizes; as an
archive, prints a file, a folder or the whole; writes a file; or removes the whole.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import re
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store
from pyarrow import NativeFile, fs

from trainer.errors import ConfigError

NOT_FOUND = 4
"""Exit code of `python -m trainer.folder` for a file or a run that does not exist."""

ASIDE = ".aside"
"""Suffix of a file that is being written; a kill may leave one behind."""

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
"""How a filesystem says that it has no links."""

T = TypeVar("T")

REQUESTS = 8
"""How often a bucket is asked before an answer of 503 or a lost connection is an error: half a minute in all.
pyarrow's own three times pass within a second."""

PATIENCE_S = 120.0
"""How long a storage may refuse what it took before: keys are renewed, a policy is mended, room is made."""

PATIENCE_POLL_S = 2.0

PIECE = 2**18
"""Bytes after which whoever sends a file hears that they have come."""

SETTLE_S = 1.0
"""How long a new object rests before it is read back, where the store itself cannot refuse a second one."""


def open_filesystem(
    path: str,
    endpoint: str | None = None,
    *,
    names: tuple[str, str] = ("storage.path", "storage.endpoint"),
    requests: int = REQUESTS,
) -> tuple[fs.FileSystem, str]:
    """The filesystem of a path, and that path in the filesystem's own words.

    Raises ConfigError, which calls path and endpoint by the names of their keys.
    """
    if path.startswith("s3://"):
        scheme, _, host = (endpoint or "https://").partition("://")
        if endpoint is not None and not (scheme in ("http", "https") and host):
            raise ConfigError(
                f"{names[1]} = {endpoint} is not an address. "
                "Write it as http://HOST:PORT or https://HOST:PORT."
            )
        # Opened late, a small file is one request and not three. A pickled one forgets its patience.
        store = fs.S3FileSystem(
            scheme=scheme,
            endpoint_override=host.rstrip("/") or None,
            allow_delayed_open=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=requests),
        )
        return store, path.removeprefix("s3://").strip("/")
    if re.match(r"\w+://", path):
        raise ConfigError(f"{names[0]} = {path} is neither a folder nor s3://bucket/prefix.")
    return fs.LocalFileSystem(), str(Path(path).resolve())


class RunFolder:
    """The paths of a run's files, and the few ways in which they are read and written.

    Nothing else composes a path. A reader sees a file whole or not at all: it is renamed into place
    on a local or shared disk, and put in one piece into an object store.
    """

    def __init__(
        self, filesystem: fs.FileSystem, root: str, *, endpoint: str | None = None
    ) -> None:
        self.filesystem = filesystem
        self.root = root
        self.endpoint = endpoint
        self.is_local = isinstance(filesystem, fs.LocalFileSystem)

    @classmethod
    def open(
        cls, path: str, name: str, endpoint: str | None = None, *, requests: int = REQUESTS
    ) -> RunFolder:
        filesystem, base = open_filesystem(path, endpoint, requests=requests)
        return cls(filesystem, f"{base}/{name}", endpoint=endpoint)

    @property
    def name(self) -> str:
        """The run's."""
        return self.root.rpartition("/")[2]

    def sibling(self, name: str) -> RunFolder:
        """The folder of another run beside it."""
        return RunFolder(self.filesystem, f"{_parent(self.root)}/{name}", endpoint=self.endpoint)

    # What a run's folder holds.

    @property
    def data(self) -> str:
        """The data set, where the run had to prepare it."""
        return f"{self.root}/data"

    @property
    def run(self) -> str:
        return f"{self.root}/run.json"

    @property
    def attempts(self) -> str:
        return f"{self.root}/attempts.jsonl"

    @property
    def starts(self) -> str:
        """Where each group of workers has started from, and once more with how long it took."""
        return f"{self.root}/starts.jsonl"

    @property
    def failures(self) -> str:
        """When workers failed, and of what."""
        return f"{self.root}/failures.jsonl"

    @property
    def workers(self) -> str:
        """Where each rank runs: in which pod, as which process."""
        return f"{self.root}/workers.json"

    @property
    def metrics(self) -> str:
        return f"{self.root}/metrics.jsonl"

    @property
    def progress(self) -> str:
        return f"{self.root}/progress.json"

    @property
    def summary(self) -> str:
        return f"{self.root}/summary.json"

    @property
    def report(self) -> str:
        return f"{self.root}/report.html"

    @property
    def model(self) -> str:
        return f"{self.root}/model.pt"

    def trees(self, file: str) -> str:
        """The model of `gradient_boosting`, in its library's own format."""
        return f"{self.root}/{file}"

    @property
    def model_facts(self) -> str:
        """What is known of the model: its network, its classes, and how images become its input."""
        return f"{self.root}/model.json"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/checkpoints"

    @property
    def lease(self) -> str:
        """Who may write: see `trainer.lease`."""
        return f"{self.root}/lease"

    @property
    def set_aside(self) -> str:
        """While its files are being set aside, where they go: see `trainer.set_aside`."""
        return f"{self.root}/set-aside.txt"

    def events(self, number: int) -> str:
        """A file of TensorBoard, which reads them in the order of their names."""
        return f"{self.root}/tensorboard/events.out.tfevents.{number:04}.trainyard"

    def stop(self, attempt: int) -> str:
        """Asks the attempt's workers to save and leave."""
        return f"{self.root}/lease/a{attempt}.stop"

    def log(self, attempt: int) -> str:
        return f"{self.root}/logs/attempt-{attempt}.log"

    # How they are read and written.

    def show(self, path: str) -> str:
        """The path as a person would type it."""
        return path if self.is_local else f"s3://{path}"

    def exists(self, path: str) -> bool:
        return self.filesystem.get_file_info(path).type != fs.FileType.NotFound

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is no such file."""
        info = self.filesystem.get_file_info(path)
        return info.size if info.type == fs.FileType.File else None

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        with self.filesystem.open_input_stream(path, compression=None) as stream:
            return stream.read()

    def sha256(self, path: str, read: Callable[[int], None] = lambda size: None) -> str:
        """Of a file's bytes; `read` hears of each piece. Raises FileNotFoundError."""
        digest = hashlib.sha256()
        with self.filesystem.open_input_stream(path, compression=None) as stream:
            while chunk := stream.read(2**24):
                digest.update(chunk)
                read(len(chunk))
        return digest.hexdigest()

    def write(self, path: str, data: bytes | str, *, is_durable: bool = True) -> None:
        with self.writing(path, is_durable=is_durable) as stream:
            stream.write(data.encode() if isinstance(data, str) else data)

    @contextmanager
    def writing(self, path: str, *, is_durable: bool = True) -> Iterator[NativeFile]:
        """A stream whose bytes become the file at the end; after an exception there is no new file.

        Durable is what survives a power cut, and takes the time that the disk needs.
        An object store shows the file when the stream is closed, and closes it by itself sooner or
        later: what an exception cut short is deleted there.
        """
        if not self.is_local:
            stream = self.filesystem.open_output_stream(path, compression=None)
            try:
                yield stream
            except BaseException:
                stream.close()
                self.delete(path)
                raise
            stream.close()
            return
        aside = _aside(path)
        self.filesystem.create_dir(_parent(path))
        try:
            with self.filesystem.open_output_stream(aside, compression=None) as stream:
                yield stream
            if is_durable:
                _to_disk(aside)
            self.filesystem.move(aside, path)
        except BaseException:
            with suppress(OSError):  # a disk that takes nothing may not let go either
                Path(aside).unlink(missing_ok=True)
            raise

    def create(self, path: str, data: str) -> bool:
        """Write a file that must not be there yet; False if it is. Of many who try, one succeeds.

        The data must be the caller's own, as no other caller's is: so a success whose answer was lost is
        told from a defeat. Where there is an `exclusion_gap`, two may succeed if they are unlucky.
        """
        content = data.encode()
        if self.is_local:
            is_new = self._link(path, content)
        elif not self.exclusion_gap:
            is_new = self._put_new(path, content)
        else:
            is_new = False
            if not self.exists(path):
                self.write(path, content)
                time.sleep(SETTLE_S)
        return is_new or self.read(path) == content

    def _link(self, path: str, content: bytes) -> bool:
        """The file appears with all its content: a link is made at once, and to no name that exists."""
        aside = _aside(path)
        try:
            self.filesystem.create_dir(_parent(path))
            _write_new(aside, content)
            os.link(aside, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # An attempt that has just begun swept what lay aside.
            return self._link(path, content)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Exclusive still, but a reader may see it before its content.
            return _write_new(path, content)
        finally:
            Path(aside).unlink(missing_ok=True)
        return True

    def _put_new(self, path: str, content: bytes) -> bool:
        """Put an object on the condition that there is none. Raises OSError."""
        bucket, _, key = path.partition("/")
        try:
            store = S3Store(
                bucket,
                endpoint=self.endpoint and self.endpoint.rstrip("/"),
                region=self.filesystem.region,
                client_options={"allow_http": True},  # the endpoint says what is spoken
                retry_config={"max_retries": REQUESTS, "retry_timeout": timedelta(seconds=40)},
            )
            obstore.put(store, key, content, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]  # what follows are internals
            raise OSError(f"s3://{path} cannot be created: {reason}") from error
        return True

    @cached_property
    def exclusion_gap(self) -> str:
        """Why `create` cannot be sure that it is alone; empty where it can be.

        Some stores take the condition of a conditional write and ignore it, so it is tried.
        """
        if self.is_local:
            return ""
        if not isinstance(self.filesystem, fs.S3FileSystem):
            return "this storage has no conditional writes"
        trial = _aside(f"{self.root}/trial")
        try:
            self._put_new(trial, b"")
            is_ignored = self._put_new(trial, b"")
        except OSError as error:
            return f"a conditional write failed: {error}"
        finally:
            self.delete(trial)
        return "this store ignores the condition of a conditional write" if is_ignored else ""

    def outlast(self, do: Callable[[], T]) -> T:
        """What `do` returns; while the storage refuses it, it is done again, for PATIENCE_S at most.

        Only for what is done beside training: at its start a run should show an error at once.
        """
        deadline = time.monotonic() + PATIENCE_S
        is_said = False
        while True:
            try:
                return do()
            except OSError as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                if not is_said:
                    print(f"storage: trying again for {left_s:.0f} s: {error}", flush=True)
                is_said = True
                time.sleep(PATIENCE_POLL_S)

    def put(
        self,
        path: str,
        source: IO[bytes],
        length: int,
        sha256: str,
        read: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Write a file of so many bytes from a stream; `read` hears how many of them have come, from 0 on.

        It appears when its SHA-256 is right: an object store, too, gets it under a name of its own first.
        Raises ValueError where other bytes have come.
        """
        aside = _aside(path)
        digest, left = hashlib.sha256(), length
        try:
            with self.writing(aside) as stream:
                read(0)
                while chunk := source.read(min(left, PIECE)):
                    stream.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
                    read(length - left)
            if left or digest.hexdigest() != sha256:
                raise ValueError(
                    f"{length - left:,} bytes of SHA-256 {digest.hexdigest()} have come, and not "
                    f"{length:,} of {sha256}"
                )
            self.move(aside, path)
        finally:
            self.delete(aside)

    def append(self, path: str, data: bytes | str) -> None:
        """Lengthen a file by all or nothing. An object store can only replace it: see `flush_interval_s`."""
        data = data.encode() if isinstance(data, str) else data
        if not self.is_local:
            before = self.read(path) if self.exists(path) else b""
            self.write(path, before + data)
            return
        self.filesystem.create_dir(_parent(path))
        size = self.size(path) or 0
        try:
            with self.filesystem.open_append_stream(path, compression=None) as stream:
                stream.write(data)
        except OSError:
            with suppress(OSError):  # where nothing can be changed, nothing was
                os.truncate(path, size)
            raise

    @property
    def flush_interval_s(self) -> float:
        """How long to gather text before it is appended: an object store rewrites the whole."""
        return 1.0 if self.is_local else 30.0

    def copy(self, source: str, target: str) -> None:
        if not self.is_local:
            self.filesystem.copy_file(source, target)
            return
        with (
            self.filesystem.open_input_stream(source, compression=None) as stream,
            self.writing(target) as copy,
        ):
            while chunk := stream.read(2**24):
                copy.write(chunk)

    def move(self, source: str, target: str) -> None:
        """Move a file, in one piece on a disk; an object store copies it and deletes it then."""
        if self.is_local:
            self.filesystem.create_dir(_parent(target))
        self.filesystem.move(source, target)

    def delete(self, path: str) -> None:
        """Remove a file or a folder with all in it, if it is there."""
        kind = self.filesystem.get_file_info(path).type
        if kind == fs.FileType.Directory:
            self._delete_folder(path)
        elif kind == fs.FileType.File:
            with suppress(FileNotFoundError):  # whoever wrote it may remove it meanwhile
                self.filesystem.delete_file(path)

    def _delete_folder(self, path: str) -> None:
        """Some object stores keep folders, too, and delete only empty ones: each time a level goes."""
        selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
        before = None
        while True:
            try:
                self.filesystem.delete_dir(path)
            except OSError:
                left = len(self.filesystem.get_file_info(selector))
                if self.is_local or (before is not None and left >= before):
                    raise
                before = left
            else:
                return

    def subfolders(self, path: str) -> list[str]:
        """Names of the folders in a folder."""
        infos = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

    def file_names(self, path: str) -> list[str]:
        """Names of the files in a folder, as they are now: opening a folder makes NFS ask its server."""
        infos = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.File)

    def files(self) -> list[str]:
        """All files, relative to the folder."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of each of its files, by their names relative to the folder."""
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return {
            info.path.removeprefix(f"{self.root}/"): info.size
            for info in infos
            if info.type == fs.FileType.File
        }

    def sweep(self) -> None:
        """Remove what killed writers left behind. Only while nobody writes but a living lease."""
        for file in self.files():
            if file.endswith(ASIDE) and not file.startswith("lease/"):
                self.delete(f"{self.root}/{file}")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _aside(path: str) -> str:
    return f"{path}.{uuid.uuid4().hex[:8]}{ASIDE}"


def _write_new(path: str, content: bytes) -> bool:
    """Write a file of this machine that must not be there yet, through to the disk."""
    try:
        with Path(path).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _to_disk(path: str) -> None:
    """Wait for the disk: the rename could otherwise outlive the file's bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _print_file(folder: RunFolder, file: str, output: IO[bytes]) -> None:
    with folder.filesystem.open_input_stream(f"{folder.root}/{file}", compression=None) as stream:
        while chunk := stream.read(2**20):
            output.write(chunk)
    output.flush()


def _put(folder: RunFolder, file: str, length: int, sha256: str) -> int:
    """Write a file from standard input; what has come of it is said, and 0 when it is awaited."""

    def told(size: int) -> None:
        print(size, flush=True)

    try:
        folder.put(f"{folder.root}/{file}", sys.stdin.buffer, length, sha256, told)
    except (OSError, ValueError) as error:
        print(f"error: {file} of run {folder.name} was not written: {error}", file=sys.stderr)
        return 1
    return 0


class _Summed:
    """What passes through to a stream, its SHA-256 and its length."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._sum = hashlib.sha256()
        self._length = 0

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        self._length += len(data)
        return self._output.write(data)

    def close(self) -> str:
        self._output.flush()
        return f"sha256 {self._sum.hexdigest()} {self._length}"


def _print_archive(folder: RunFolder, names: list[str], below: str, output: IO[bytes]) -> str:
    """Print these files as a tar archive, with names that begin at `below`; its SHA-256 and length."""
    summed = _Summed(output)
    with tarfile.open(fileobj=summed, mode="w|") as archive:  # type: ignore[call-overload]
        for name in names:
            path = f"{folder.root}/{name}"
            entry = tarfile.TarInfo(str(PurePosixPath(name).relative_to(below)))
            # A file that grows meanwhile is taken as it was.
            entry.size = folder.size(path) or 0
            with folder.filesystem.open_input_stream(path, compression=None) as stream:
                archive.addfile(entry, stream)
    return summed.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.folder", allow_abbrev=False)
    parser.add_argument("--path", required=True, help="where the folders of runs lie")
    parser.add_argument("--endpoint", help="address of an S3 server that is not AWS")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--archive",
        action="store_true",
        help="print a tar archive of the file, of the folder FILE, or of the whole run; its SHA-256 "
        "and length are the last line of standard error",
    )
    how.add_argument("--delete", action="store_true", help="remove the run's folder")
    how.add_argument(
        "--put",
        nargs=2,
        metavar=("LENGTH", "SHA256"),
        help="write FILE from standard input; how many bytes have come is printed meanwhile",
    )
    how.add_argument("--sizes", action="store_true", help="list all files, each after its bytes")
    how.add_argument("--sum", action="store_true", help="print the SHA-256 of FILE")
    parser.add_argument("name", help="the run")
    parser.add_argument("file", nargs="?", help="print this file; without it, list all files")
    wanted = parser.parse_args(arguments)

    parts = PurePosixPath(wanted.name, wanted.file or "").parts
    if ".." in parts or PurePosixPath(wanted.file or "").is_absolute() or "/" in wanted.name:
        parser.error("NAME and FILE must lie below PATH")
    try:
        folder = RunFolder.open(wanted.path, wanted.name, wanted.endpoint)
    except ConfigError as error:
        parser.error(str(error))

    if wanted.put:
        if wanted.file is None or not wanted.put[0].isdecimal():
            parser.error("--put LENGTH SHA256 writes one FILE of so many bytes")
        return _put(folder, wanted.file, int(wanted.put[0]), wanted.put[1])
    sizes = folder.sizes() if wanted.file is None or wanted.archive else {}
    files = sorted(sizes)
    if wanted.sum and wanted.file is None:
        parser.error("--sum is of one FILE")
    if wanted.sizes and wanted.file is not None:
        parser.error("--sizes are of the whole folder: leave FILE out")
    if wanted.file is None and not files:
        print(f"error: there is no run {wanted.name} in {wanted.path}", file=sys.stderr)
        return NOT_FOUND
    if wanted.delete:
        if wanted.file is not None:
            parser.error("--delete removes the whole folder: leave FILE out")
        folder.delete(folder.root)
        return 0
    if wanted.archive:
        root = (wanted.file or "").strip("/")
        names = [name for name in files if not root or name == root or name.startswith(f"{root}/")]
        if names:
            below = str(PurePosixPath(root).parent) if root in names else root
            told = _print_archive(folder, names, below, sys.stdout.buffer)
            print(told, file=sys.stderr, flush=True)
            # Kubernetes throws away what a slow reader has not got 10 s after the end of a program: this
            # one ends when the reader says so.
            sys.stdin.buffer.read(1)
            return 0
    elif wanted.sizes:
        for name in files:
            print(sizes[name], name)
        return 0
    elif wanted.file is None:
        print("\n".join(files))
        return 0
    if wanted.archive or folder.size(f"{folder.root}/{wanted.file}") is None:
        print(
            f"error: run {wanted.name} in {wanted.path} has no file {wanted.file}", file=sys.stderr
        )
        return NOT_FOUND
    if wanted.sum:
        print(folder.sha256(f"{folder.root}/{wanted.file}"))
    else:
        _print_file(folder, wanted.file, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
