"""A folder of code -> the archive that travels with a run, in a variable of the Ray head."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from launcher.errors import ConfigError

LIMIT_KIB = 96
"""Of the archive in base64: Linux takes no variable above 128 KiB, and etcd no object above 1.5 MiB."""

NEVER = (".git", "__pycache__")
"""Names that no program of one's own needs."""

SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """A packed folder."""

    text: str
    """The tar.gz in base64."""
    sha256: str
    """Of the tar.gz; the same for the same names and contents."""


def pack(folder: Path) -> Overlay:
    """The files of a folder but for what .gitignore names. Raises ConfigError with what is large.

    Times, owners and groups stay behind, so that equal code is an equal submission.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"code = {folder}: there is no such folder",
            "Its path counts from the folder of the run file.",
        )
    files = sorted(_files(folder))
    if not files:
        raise ConfigError(f"code = {folder}: the folder holds no file that travels")
    stream = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=stream, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in files:
            content = (folder / name).read_bytes()
            member = tarfile.TarInfo(str(name))
            member.size = len(content)
            member.mode = 0o755 if os.access(folder / name, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(content))
    packed = stream.getvalue()
    text = base64.b64encode(packed).decode()
    if len(text) > LIMIT_KIB * 1024:
        raise _too_large(folder, files, len(text))
    return Overlay(text=text, sha256=hashlib.sha256(packed).hexdigest())


def _files(folder: Path) -> Iterator[PurePosixPath]:
    """Paths below the folder, each .gitignore counting from where it lies. Raises ConfigError for links."""
    rules: list[tuple[PurePosixPath, GitIgnoreSpec]] = []
    for place, folders, names in os.walk(folder):
        here = PurePosixPath(Path(place).relative_to(folder).as_posix())
        if ".gitignore" in names:
            lines = Path(place, ".gitignore").read_text(encoding="utf-8").splitlines()
            rules.append((here, GitIgnoreSpec.from_lines(lines)))
        folders[:] = sorted(
            name
            for name in folders
            if name not in NEVER and not _is_ignored(here / name, rules, is_folder=True)
        )
        for name in (*folders, *names):
            if Path(place, name).is_symlink() and not _is_ignored(here / name, rules):
                raise ConfigError(
                    f"code = {folder}: {here / name} is a link, which cannot travel",
                    "Put the file in its place, or name it in .gitignore.",
                )
        yield from (here / name for name in names if not _is_ignored(here / name, rules))


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


def _too_large(folder: Path, files: list[PurePosixPath], length: int) -> ConfigError:
    sizes = sorted(((folder / name).stat().st_size, str(name)) for name in files)
    largest = ", ".join(
        f"{name} ({size / 1024:,.0f} KiB)" for size, name in sizes[: -SHOWN - 1 : -1]
    )
    return ConfigError(
        f"code = {folder}: its {len(files)} files are {length / 1024:,.0f} KiB packed, and at most "
        f"{LIMIT_KIB} KiB travel with a run",
        f"The largest: {largest}.",
        "Name what the program does not need in .gitignore, read data from the storage, or build an "
        "image with the code in it (docs/own-code.md).",
    )
