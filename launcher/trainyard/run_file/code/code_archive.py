"""Pack a folder of code into an archive for a run.

A small archive is passed to the Ray head in an environment variable. `submit` uploads a larger one to the
run's folder.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trainyard.errors import ConfigError
from trainyard.run_file.code.code_files import files_of
from trainyard.run_file.credentials import credential_in_file
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.run_files.submission import unpacked_limit

LIMIT_KIB = 96
"""The limit for an archive in base64 in an environment variable. Linux limits variables to 128 KiB, and
etcd limits objects to 1.5 MiB."""

UPLOAD_LIMIT_MIB = 100
"""The limit for an archive that is uploaded. Larger folders contain data, or belong into an image."""

SEARCHED_MIB = 16
"""The size of the part of each file that is searched for credentials."""

SHOWN = 5
"""The largest number of files in an error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """The archive of a folder of the user's code."""

    archive: bytes = field(repr=False)
    """The content of the tar.gz file."""
    sha256: str
    """The SHA-256 of the tar.gz file. It is the same for the same names and contents."""

    @property
    def text(self) -> str:
        """The archive in base64, as the environment variable contains it."""
        return base64.b64encode(self.archive).decode()

    @property
    def text_bytes(self) -> int:
        """The length of `text`: the size of the archive in an environment variable."""
        return (len(self.archive) + 2) // 3 * 4

    @property
    def is_uploaded(self) -> bool:
        """Whether the archive is too large for an environment variable, and must be uploaded."""
        return self.text_bytes > LIMIT_KIB * 1024


def pack(folder: Path, limit_mib: int | None = UPLOAD_LIMIT_MIB) -> Overlay:
    """Pack the files of a folder of code that `code_files` selects.

    Times, owners and groups are not stored, so that the same code results in the same submission.
    Raises ConfigError for files with credentials, and if the archive is larger than the limit.
    """
    try:
        return _pack(folder, limit_mib)
    except OSError as error:
        raise ConfigError(f"code = {folder}: cannot be read: {error}") from error


def _pack(folder: Path, limit_mib: int | None) -> Overlay:
    if not folder.is_dir():
        raise ConfigError(
            f"code = {folder}: the folder does not exist",
            "The path is relative to the folder of the run file.",
        )
    files = sorted(files_of(folder))
    if not files:
        raise ConfigError(f"code = {folder}: the folder has no files to pack")
    _refuse_credentials(folder, files)
    stream = io.BytesIO() if limit_mib is None else _Bounded(limit_mib * 2**20)
    unpacked = 0
    try:
        with (
            gzip.GzipFile(fileobj=stream, mode="wb", filename="", mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in files:
                with (folder / name).open("rb") as content:
                    unpacked += _add(archive, str(name), content)
    except _Full:
        raise _too_large(folder, files, f"more than {limit_mib} MiB packed") from None
    packed = stream.getvalue()
    if unpacked > unpacked_limit(len(packed)):
        raise _too_large(
            folder,
            files,
            f"{size_text(unpacked)}, more than the limit of {size_text(unpacked_limit(len(packed)))} for "
            f"an archive of {size_text(len(packed))}",
        )
    return Overlay(archive=packed, sha256=hashlib.sha256(packed).hexdigest())


def require_to_travel(code: Overlay | None) -> None:
    """Raise ConfigError if the code does not fit into the RayJob, so that only `submit` can transfer it."""
    if code is None or not code.is_uploaded:
        return
    with tarfile.open(fileobj=io.BytesIO(code.archive)) as archive:
        sizes = [(member.size, member.name) for member in archive]
    raise ConfigError(
        f"code: its {len(sizes)} files are {size_text(code.text_bytes)} in base64, more than the limit of "
        f"{LIMIT_KIB} KiB in a RayJob",
        f"The largest files: {_largest(sizes)}.",
        "Use `trainyard submit`, which uploads the code to the run's folder. Or list files that the program "
        "does not need in .gitignore, or build an image with the code in it (docs/guides/own-code.md).",
    )


class _Full(Exception):
    """An error: the archive is larger than the limit."""


class _Bounded(io.BytesIO):
    """A stream in memory with a limit. Raises _Full if it would be exceeded."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._limit:
            raise _Full
        return super().write(data)


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes]) -> int:
    """Add a file to an archive without its owner and time, and return its size in bytes."""
    status = os.fstat(content.fileno())
    member = tarfile.TarInfo(name)
    member.size = status.st_size
    member.mode = 0o755 if status.st_mode & 0o111 else 0o644
    archive.addfile(member, content)
    return member.size


def _refuse_credentials(folder: Path, files: list[PurePosixPath]) -> None:
    """Raise ConfigError for files with credentials: many people may be able to read the code of a run."""
    found = []
    for name in files:
        with (folder / name).open("rb") as content:
            what = credential_in_file(str(name), content.read(SEARCHED_MIB * 2**20))
        if what is not None:
            found.append(f"{name}: {what}")
    if found:
        raise ConfigError(
            f"code = {folder}: {'1 file' if len(found) == 1 else f'{len(found)} files'} with credentials "
            "would be readable in the RayJob and in the run's folder",
            *found[:SHOWN],
            *([f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []),
            "List such files in .gitignore to leave them out. Give the pods the credential with a Secret "
            "that the chart's values name (storage.s3.secretName), or with their service account's identity.",
        )


def _too_large(folder: Path, files: list[PurePosixPath], what: str) -> ConfigError:
    sizes = [((folder / name).stat().st_size, str(name)) for name in files]
    return ConfigError(
        f"code = {folder}: its {len(files)} files are {what}",
        f"The largest files: {_largest(sizes)}.",
        "List files that the program does not need in .gitignore, read data from the storage, or build an "
        "image with the code in it (docs/guides/own-code.md).",
    )


def _largest(sizes: Iterable[tuple[int, str]]) -> str:
    return ", ".join(
        f"{name} ({size_text(size)})" for size, name in sorted(sizes)[: -SHOWN - 1 : -1]
    )
