"""A folder on any filesystem that pyarrow knows, and the few ways in which its files are read and written."""

from __future__ import annotations

import errno
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store
from pyarrow import NativeFile, fs

from trainyard_trainer.config.location import endpoint_problem, location_problem
from trainyard_trainer.errors import ConfigError, MissingFileError, StorageError
from trainyard_trainer.run_files.driver_output import STORAGE

ASIDE = ".aside"
"""Suffix of a file that is being written; a kill may leave one behind."""

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
"""How a filesystem says that it has no links."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""How a filesystem says that it takes no more bytes."""

NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""How a filesystem says that this user may not do something."""

WRONG_KIND = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
"""How a filesystem says that a file lies where a folder is needed, or the other way round."""

CHUNK_BYTES = 2**24
"""The number of bytes of a file that are held in memory when it is read or copied."""

T = TypeVar("T")


class Writable(Protocol):
    """A stream for the bytes of a file."""

    def write(self, data: Any) -> int: ...

    def flush(self) -> None: ...


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
    if not path.isprintable():
        raise ConfigError(
            f"{names[0]} = {path!r}: must be UTF-8, without control characters. "
            "Use or create a folder with another name."
        )
    if (problem := location_problem(path)) is not None:
        raise ConfigError(f"{names[0]} = {path} {problem}.")
    if path.startswith("s3://"):
        if endpoint is not None and (problem := endpoint_problem(endpoint)) is not None:
            raise ConfigError(f"{names[1]} = {endpoint} {problem}.")
        scheme, _, host = (endpoint or "https://").partition("://")
        # Opened late, a small file is one request and not three. A pickled one forgets its patience.
        store = fs.S3FileSystem(
            scheme=scheme,
            endpoint_override=host.rstrip("/") or None,
            allow_delayed_open=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=requests),
        )
        return store, path.removeprefix("s3://").strip("/")
    return fs.LocalFileSystem(), str(Path(path).resolve())


class StorageFolder:
    """A folder of a disk or of a bucket; its methods take whole paths in the filesystem's own words.

    A reader sees a file whole or not at all: it is renamed into place on a local or shared disk, and put in
    one piece into an object store. Whatever goes wrong with it is a StorageError, which names the operation
    and the path; for a file that is missing it is a FileNotFoundError, too.
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

    @contextmanager
    def explained(self, participle: str, path: str) -> Iterator[None]:
        """Turn an OSError of the block into a StorageError that says what could not be done with the path.

        The block must do nothing but this operation, so that no other error gets the storage's name.
        """
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self._error(participle, path, error) from error

    def _error(self, participle: str, path: str, error: OSError) -> StorageError:
        is_missing = isinstance(error, FileNotFoundError)
        code = errno.ENOENT if is_missing else error.errno
        reason = os.strerror(code) if code else " ".join(str(error).split()).rstrip(".")
        problem = f"{self.show(path)} cannot be {participle}: {reason}. {self._remedy(code)}"
        return (MissingFileError if is_missing else StorageError)(problem, code)

    def _remedy(self, code: int | None) -> str:
        """Return a sentence that says what to do about an error of the storage."""
        if not self.is_local:
            return "The bucket must be reachable, and its keys must allow to list, get, put and delete."
        if code in NO_ROOM:
            return "Make room on this disk, or enlarge it."
        if code in NOT_ALLOWED:
            return f"User {os.getuid()} must be allowed to read and write there."
        if code in WRONG_KIND:
            return "Remove the file that lies in the place of a folder, or use another path."
        return "The disk must be mounted, and no other program may remove files there."

    def infos(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        """Return type, size and time of files."""
        with self.explained("accessed", paths[0] if paths else self.root):
            return self.filesystem.get_file_info(list(paths))

    def _info(self, path: str) -> fs.FileInfo:
        return self.infos([path])[0]

    def _list(self, path: str, *, is_recursive: bool = False) -> list[fs.FileInfo]:
        """Return what a folder holds; nothing if there is no such folder."""
        selector = fs.FileSelector(path, recursive=is_recursive, allow_not_found=True)
        with self.explained("listed", path):
            try:
                return self.filesystem.get_file_info(selector)
            except FileNotFoundError:
                # Arrow could not open the folder, and then saw that it exists: it was made in between.
                return self.filesystem.get_file_info(selector)

    def exists(self, path: str) -> bool:
        return self._info(path).type != fs.FileType.NotFound

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        info = self._info(path)
        return info.size if info.type == fs.FileType.File else None

    def read(self, path: str) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError if there is none."""
        with (
            self.explained("read", path),
            self.filesystem.open_input_stream(path, compression=None) as stream,
        ):
            return stream.read()

    def chunks(self, path: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the bytes of a file, some at a time. Raises FileNotFoundError if there is none."""
        with self.explained("read", path):
            stream = self.filesystem.open_input_stream(path, compression=None)
        with stream:
            while True:
                with self.explained("read", path):
                    chunk = stream.read(size)
                if not chunk:
                    return
                yield chunk

    def sha256(self, path: str, read: Callable[[int], None] = lambda size: None) -> str:
        """Of a file's bytes; `read` hears of each piece. Raises FileNotFoundError."""
        digest = hashlib.sha256()
        for chunk in self.chunks(path):
            digest.update(chunk)
            read(len(chunk))
        return digest.hexdigest()

    def upload(self, local: Path, path: str) -> None:
        """Copy a file of this machine into the storage. Raises StorageError."""
        with local.open("rb") as stream, self.writing(path) as output:
            while chunk := stream.read(CHUNK_BYTES):
                output.write(chunk)

    def write(self, path: str, data: bytes | str, *, is_durable: bool = True) -> None:
        with self.writing(path, is_durable=is_durable) as stream:
            stream.write(data.encode() if isinstance(data, str) else data)

    @contextmanager
    def writing(self, path: str, *, is_durable: bool = True) -> Iterator[Writable]:
        """A stream whose bytes become the file at the end; after an exception there is no new file.

        Durable is what survives a power cut, and takes the time that the disk needs.
        An object store shows the file when the stream is closed, and closes it by itself sooner or
        later: what an exception cut short is deleted there.
        """
        if not self.is_local:
            with self.explained("written", path):
                stream = self.filesystem.open_output_stream(path, compression=None)
            try:
                yield _StorageStream(self, path, stream)
            except BaseException:
                with self.explained("written", path):
                    stream.close()
                self.delete(path)
                raise
            with self.explained("written", path):
                stream.close()
            return
        aside = _aside(path)
        try:
            with self.explained("written", path):
                self.filesystem.create_dir(parent(path))
                stream = self.filesystem.open_output_stream(aside, compression=None)
            try:
                yield _StorageStream(self, path, stream)
            finally:
                with self.explained("written", path):
                    stream.close()
            with self.explained("written", path):
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
        with self.explained("created", path):
            self.filesystem.create_dir(parent(path))
            try:
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
        """Put an object on the condition that there is none. Raises StorageError."""
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
        except (BaseError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]  # what follows are internals
            raise self._error("created", path, OSError(reason)) from error
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
        except StorageError as error:
            return f"a conditional write failed: {error.problem}"
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
            except StorageError as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                if not is_said:
                    print(f"{STORAGE}trying again for {left_s:.0f} s: {error.problem}", flush=True)
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
        size = self.size(path) or 0
        with self.explained("written", path):
            self.filesystem.create_dir(parent(path))
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
            with self.explained("copied", source):
                self.filesystem.copy_file(source, target)
            return
        with self.writing(target) as copy:
            for chunk in self.chunks(source):
                copy.write(chunk)

    def move(self, source: str, target: str) -> None:
        """Move a file, in one piece on a disk; an object store copies it and deletes it then."""
        with self.explained("moved", source):
            if self.is_local:
                self.filesystem.create_dir(parent(target))
            self.filesystem.move(source, target)

    def delete(self, path: str) -> None:
        """Remove a file or a folder with all in it, if it is there."""
        kind = self._info(path).type
        with self.explained("deleted", path):
            if kind == fs.FileType.Directory:
                self._delete_folder(path)
            elif kind == fs.FileType.File:
                with suppress(FileNotFoundError):  # whoever wrote it may remove it meanwhile
                    self.filesystem.delete_file(path)

    def _delete_folder(self, path: str) -> None:
        """Some object stores keep folders, too, and delete only empty ones: each time a level goes."""
        before = None
        while True:
            try:
                self.filesystem.delete_dir(path)
            except OSError:
                left = len(self._list(path, is_recursive=True))
                if self.is_local or (before is not None and left >= before):
                    raise
                before = left
            else:
                return

    def subfolders(self, path: str) -> list[str]:
        """Return the names of the sub-folders of a folder."""
        infos = self._list(path)
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

    def file_names(self, path: str) -> list[str]:
        """Names of the files in a folder, as they are now: opening a folder makes NFS ask its server."""
        infos = self._list(path)
        return sorted(info.base_name for info in infos if info.type == fs.FileType.File)

    def files(self) -> list[str]:
        """Return the paths of all files, relative to this folder."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of each of its files, by their names relative to the folder."""
        return {name: info.size for name, info in self.tree().items()}

    def tree(self) -> dict[str, fs.FileInfo]:
        """Return size and time of each of its files, by their names relative to the folder."""
        return {
            info.path.removeprefix(f"{self.root}/"): info
            for info in self._list(self.root, is_recursive=True)
            if info.type == fs.FileType.File
        }


class _StorageStream:
    """A stream of the storage whose errors are StorageErrors."""

    closed = False

    def __init__(self, folder: StorageFolder, path: str, stream: NativeFile) -> None:
        self._folder = folder
        self._path = path
        self._stream = stream

    def write(self, data: Any) -> int:
        with self._folder.explained("written", self._path):
            return self._stream.write(data)

    def flush(self) -> None:
        with self._folder.explained("written", self._path):
            self._stream.flush()

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        """Do nothing: Arrow calls it, and `writing` closes the stream."""


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
