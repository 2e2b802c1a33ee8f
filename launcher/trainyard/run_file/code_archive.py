"""A folder of code -> the archive that travels with a run: in a variable of the Ray head, or, where it is
too large for that, through the run's folder, to which `submit` uploads it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from pathspec import GitIgnoreSpec

from trainyard.errors import ConfigError
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.run_files.submission import unpacked_limit

LIMIT_KIB = 96
"""Of the archive in base64: Linux takes no variable above 128 KiB, and etcd no object above 1.5 MiB."""

UPLOAD_LIMIT_MIB = 100
"""Of the archive that is uploaded: what is larger is data, or belongs into an image."""

NEVER = (".git", "__pycache__")
"""Names that no program of one's own needs."""

SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """The archive of a folder of the user's code, and how it travels with a run."""

    archive: bytes = field(repr=False)
    """The tar.gz."""
    sha256: str
    """Of the tar.gz; the same for the same names and contents."""

    @property
    def text(self) -> str:
        """The tar.gz in base64, as a variable holds it."""
        return base64.b64encode(self.archive).decode()

    @property
    def text_bytes(self) -> int:
        """Return the length of `text`: the bytes that the archive takes in an environment variable."""
        return (len(self.archive) + 2) // 3 * 4

    @property
    def is_uploaded(self) -> bool:
        """Whether it is too large for a variable."""
        return self.text_bytes > LIMIT_KIB * 1024


def pack(folder: Path, limit_mib: int | None = UPLOAD_LIMIT_MIB) -> Overlay:
    """The files of a folder but for what .gitignore names. Raises ConfigError with what is large.

    Times, owners and groups stay behind, so that equal code is an equal submission.
    """
    try:
        return _pack(folder, limit_mib)
    except OSError as error:
        raise ConfigError(f"code = {folder}: cannot be read: {error}") from error


def _pack(folder: Path, limit_mib: int | None) -> Overlay:
    if not folder.is_dir():
        raise ConfigError(
            f"code = {folder}: there is no such folder",
            "Its path counts from the folder of the run file.",
        )
    files = sorted(_files(folder))
    if not files:
        raise ConfigError(f"code = {folder}: the folder holds no file that travels")
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
            f"{size_text(unpacked)}, and as {size_text(len(packed))} packed at most "
            f"{size_text(unpacked_limit(len(packed)))} are unpacked",
        )
    return Overlay(archive=packed, sha256=hashlib.sha256(packed).hexdigest())


def require_to_travel(code: Overlay | None) -> None:
    """Raises ConfigError for code that is not in the RayJob, and so must be uploaded by `submit`."""
    if code is None or not code.is_uploaded:
        return
    with tarfile.open(fileobj=io.BytesIO(code.archive)) as archive:
        sizes = [(member.size, member.name) for member in archive]
    raise ConfigError(
        f"code: its {len(sizes)} files are {size_text(code.text_bytes)} of packed text, and at most "
        f"{LIMIT_KIB} KiB travel in a RayJob: what is rendered would not have them",
        f"The largest: {_largest(sizes)}.",
        "`trainyard submit` uploads it to the run's folder. Or name what the program does not need in "
        ".gitignore, or build an image with the code in it (docs/guides/own-code.md).",
    )


class _Full(Exception):
    """The archive has become too large."""


class _Bounded(io.BytesIO):
    """Bytes in memory, and no more than these. Raises _Full."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._limit:
            raise _Full
        return super().write(data)


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes]) -> int:
    """Bytes of a file that is added as anybody's, of no time."""
    status = os.fstat(content.fileno())
    member = tarfile.TarInfo(name)
    member.size = status.st_size
    member.mode = 0o755 if status.st_mode & 0o111 else 0o644
    archive.addfile(member, content)
    return member.size


def _files(folder: Path) -> Iterator[PurePosixPath]:
    """Paths below the folder, each .gitignore counting from where it lies. Raises ConfigError for what is
    neither file nor folder: a pipe would be waited for, for ever."""
    rules: list[tuple[PurePosixPath, GitIgnoreSpec]] = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        here = PurePosixPath(Path(place).relative_to(folder).as_posix())
        if ".gitignore" in names:
            rules.append((here, _spec_of(folder, here / ".gitignore")))
        folders[:] = sorted(
            name
            for name in folders
            if name not in NEVER and not _is_ignored(here / name, rules, is_folder=True)
        )
        for name in (*folders, *names):
            mode = Path(place, name).lstat().st_mode
            is_plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            if not is_plain and not _is_ignored(here / name, rules):
                what = "a link" if stat.S_ISLNK(mode) else "no file"
                raise ConfigError(
                    f"code = {folder}: {here / name} is {what}, which cannot travel",
                    "Put the file in its place, or name it in .gitignore.",
                )
        yield from (here / name for name in names if not _is_ignored(here / name, rules))


def _raise(error: OSError) -> NoReturn:
    """For a folder that may not be read: `os.walk` would leave it out."""
    raise error


def _spec_of(folder: Path, name: PurePosixPath) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines((folder / name).read_text(encoding="utf-8").splitlines())
    except ValueError as error:  # not UTF-8, or no pattern
        raise ConfigError(f"code = {folder}: {name} cannot be read: {error}") from error


def _is_ignored(
    path: PurePosixPath,
    rules: list[tuple[PurePosixPath, GitIgnoreSpec]],
    *,
    is_folder: bool = False,
) -> bool:
    """Whether the nearest .gitignore that speaks of a path leaves it out."""
    for place, spec in reversed(rules):
        if path.is_relative_to(place):
            verdict = spec.check_file(f"{path.relative_to(place)}{'/' if is_folder else ''}")
            if verdict.include is not None:
                return bool(verdict.include)
    return False


def _too_large(folder: Path, files: list[PurePosixPath], what: str) -> ConfigError:
    sizes = [((folder / name).stat().st_size, str(name)) for name in files]
    return ConfigError(
        f"code = {folder}: its {len(files)} files are {what}",
        f"The largest: {_largest(sizes)}.",
        "Name what the program does not need in .gitignore, read data from the storage, or build an "
        "image with the code in it (docs/guides/own-code.md).",
    )


def _largest(sizes: Iterable[tuple[int, str]]) -> str:
    return ", ".join(
        f"{name} ({size_text(size)})" for size, name in sorted(sizes)[: -SHOWN - 1 : -1]
    )
