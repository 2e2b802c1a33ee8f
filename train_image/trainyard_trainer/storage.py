"""A folder on any filesystem that pyarrow knows, and the few ways in which its files are read and written."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store
from pyarrow import NativeFile, fs

from trainyard_trainer.errors import ConfigError

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


class StorageFolder:
    """A folder of a disk or of a bucket; its methods take whole paths in the filesystem's own words.

    A reader sees a file whole or not at all: it is renamed into place on a local or shared disk, and put in
    one piece into an object store.
    """

    def __init__(
        self, filesystem: fs.FileSystem, root: str, *, endpoint: str | None = None
    ) -> None:
        self.filesystem = filesystem
        self.root = root
        self.endpoint = endpoint
        self.is_local = isinstance(filesystem, fs.LocalFileSystem)

    def show(self, path: str) -> str:
        """Return the path as a user would write it."""
        return path if self.is_local else f"s3://{path}"

    def exists(self, path: str) -> bool:
        return self.filesystem.get_file_info(path).type != fs.FileType.NotFound

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        info = self.filesystem.get_file_info(path)
        return info.size if info.type == fs.FileType.File else None

    def read(self, path: str) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError if there is none."""
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
        self.filesystem.create_dir(parent(path))
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
            self.filesystem.create_dir(parent(path))
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
        self.filesystem.create_dir(parent(path))
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
            self.filesystem.create_dir(parent(target))
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
        """Return the names of the sub-folders of a folder."""
        infos = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

    def file_names(self, path: str) -> list[str]:
        """Names of the files in a folder, as they are now: opening a folder makes NFS ask its server."""
        infos = self.filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.File)

    def files(self) -> list[str]:
        """Return the paths of all files, relative to this folder."""
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


def parent(path: str) -> str:
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
