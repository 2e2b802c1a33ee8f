"""The files of a source, with the rules for links, hidden files, names and files that cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.errors import ConfigError, RunError, StorageError

HIDDEN = (".", "__MACOSX")
"""Beginnings of the names of files and folders that programs keep for themselves."""

SOURCE_KEYS = ("data.source", "data.endpoint")
"""The keys of a run file that name a source."""

_WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that are due to the path or to its permissions, not to the state of the storage."""


@contextmanager
def explained_errors(
    path: str, key: str = "data.source", *, kind: str = "Parquet file"
) -> Iterator[None]:
    """Turn errors of the system and of Arrow into typed errors that name the file or folder of a source.

    Raises ConfigError for what a retry cannot change: a missing file, a missing permission, content that
    Arrow cannot read. Raises RunError if the storage of the source fails. `key` is what names the source, and
    `kind` what the file should be.
    """
    try:
        yield
    except StorageError:
        raise  # It is of another file, such as one that is written meanwhile.
    except _WRONG_PATH as error:
        reason = os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
        raise ConfigError(
            f"{path} cannot be read: {reason}. Correct {key}, or the permissions of the file."
        ) from error
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error}. Check that the storage of {key} can be reached."
        ) from error
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{path} is no intact {kind}: {reason.rstrip('.')}. Write it again, or remove it."
        ) from error


def broken_link_target(filesystem: fs.FileSystem, path: str) -> str | None:
    """Return the target of a link that leads to nothing; None for everything else."""
    if not isinstance(filesystem, fs.LocalFileSystem) or not Path(path).is_symlink():
        return None
    return None if Path(path).exists() else str(Path(path).readlink())


def require_utf8(path: str) -> None:
    """Raise ConfigError for a path that is not UTF-8: neither Arrow nor JSON can name it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise ConfigError(
            f"the name of {shown} is not UTF-8: the bytes after each \\x are no character. Rename it, for "
            "example with `convmv -f latin1 -t utf8 --notest`."
        ) from None


def find_root(path: str, filesystem: fs.FileSystem, root: str, endpoint: str | None) -> fs.FileInfo:
    """Return the file or folder at the path of a source. Raises ConfigError if there is nothing."""
    require_utf8(path)
    with explained_errors(path):
        info = filesystem.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"there is no {path}" + (f" at {endpoint}." if endpoint else "."))
    return info


def list_all(
    filesystem: fs.FileSystem, root: str, say: Callable[[str], None] = lambda line: None
) -> list[fs.FileInfo]:
    """Return all files and folders below the root, ordered by path, without hidden ones.

    Links are followed, and a link that leads to nothing counts as a file, so that whoever needs it finds
    out. Links that leave the root are announced by `say`. Raises ConfigError for a folder that would be read
    twice or without end because of a link, and for a name that is not UTF-8.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        with explained_errors(root):
            infos = _LocalWalk(root, say).infos()
    else:
        with explained_errors(root):
            found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
        infos = [info for info in found if not _is_hidden(info.path.removeprefix(f"{root}/"))]
    return sorted(infos, key=lambda info: info.path)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(HIDDEN) for part in path.split("/"))


class _LocalWalk:
    """A walk through a folder of this machine. pyarrow's own follows links in circles."""

    def __init__(self, root: str, say: Callable[[str], None]) -> None:
        self._root = root
        self._say = say
        self._real_root = os.path.realpath(root)
        self._folders: dict[tuple[int, int], str] = {}
        """The path of each folder that was entered, by device and inode."""
        self._files: dict[str, str] = {}
        """The first link to each file, by the file's real path."""
        self._outside: list[str] = []
        self._twice: list[str] = []

    def infos(self) -> list[fs.FileInfo]:
        require_utf8(self._root)
        found = list(self._below(self._root))
        for links, text in (
            (self._outside, "links that leave the folder, and are followed"),
            (self._twice, "links to files that are read under another name too"),
        ):
            if links:
                self._say(
                    f"{self._root}: {text}: {len(links)}, such as {links[0]} -> {Path(links[0]).readlink()}"
                )
        return found

    def _below(self, root: str) -> Iterator[fs.FileInfo]:
        pending = [root]
        while pending:
            folder = pending.pop()
            self._enter(folder)
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda each: each.name):
                    if entry.name.startswith(HIDDEN):
                        continue
                    require_utf8(entry.path)
                    if entry.is_symlink():
                        self._check_link(entry.path)
                    info = _info_of(entry)
                    if info.type == fs.FileType.Directory:
                        pending.append(entry.path)
                    yield info

    def _enter(self, folder: str) -> None:
        """Raise ConfigError for a folder that was entered before under another path."""
        found = Path(folder).stat()
        other = self._folders.setdefault((found.st_dev, found.st_ino), folder)
        if other != folder:
            link = other if os.path.realpath(folder) == folder else folder
            raise ConfigError(
                f"{link} is the same folder as {folder if link == other else other}, by way of a link: its "
                "files would be read twice. Remove the link."
            )

    def _check_link(self, link: str) -> None:
        """Raise ConfigError for a link to a folder that contains it; note links that leave the root."""
        target = os.path.realpath(link)
        place = os.path.realpath(Path(link).parent)
        if Path(target).is_dir() and f"{place}/".startswith(f"{target.rstrip('/')}/"):
            raise ConfigError(
                f"{link} is a link in a circle: it leads to {Path(link).readlink()}, a folder that contains "
                "the link itself, so its files would be read again and again. Remove the link."
            )
        is_inside = f"{target}/".startswith(f"{self._real_root}/")
        if not is_inside and Path(target).exists():
            self._outside.append(link)
        if Path(target).is_file() and (is_inside or target in self._files):
            self._twice.append(link)
        self._files.setdefault(target, link)


def _info_of(entry: os.DirEntry[str]) -> fs.FileInfo:
    """Return what pyarrow would say of a file, but a link to nothing is a file without bytes."""
    if entry.is_symlink() and not Path(entry.path).exists():
        return fs.FileInfo(entry.path, fs.FileType.File, size=0)
    found = entry.stat()
    if stat.S_ISDIR(found.st_mode):
        return fs.FileInfo(entry.path, fs.FileType.Directory, mtime_ns=found.st_mtime_ns)
    if stat.S_ISREG(found.st_mode):
        return fs.FileInfo(
            entry.path, fs.FileType.File, mtime_ns=found.st_mtime_ns, size=found.st_size
        )
    return fs.FileInfo(entry.path, fs.FileType.Unknown, mtime_ns=found.st_mtime_ns)
