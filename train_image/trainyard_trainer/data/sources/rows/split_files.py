"""Find the files of a source with rows, by the endings of their names, and the splits that they belong to.

A data set of Lance is a folder, and counts as one file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from pyarrow import fs

from trainyard_trainer.data.sources.lance_datasets import (
    SUFFIX,
    LanceTable,
    LanceVersion,
    is_dataset,
    lance_folders,
    open_dataset,
    split_version,
    version_of,
)
from trainyard_trainer.data.sources.listing import SOURCE_KEYS, find_root, list_all
from trainyard_trainer.data.sources.parquet_files import is_left_out, is_parquet, refuse_versioned
from trainyard_trainer.data.sources.parts import SPLIT_COLUMN
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

SplitName = Literal["train", "valid"]

SPLITS: dict[str, SplitName] = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
}
"""The split of a file, or of a folder, by the beginning of its name. Files of `test` are not read."""

DATASETS_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files with which the library `datasets` describes a data set."""

WILDCARDS = {"*", "?"}
"""The characters of a pattern of names: `*` stands for any characters, `?` for one."""

UNUSED = "test"
"""The word at the beginning of the names of files and folders that are not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFormat:
    """A kind of file that holds rows."""

    name: str
    description: str
    suffixes: tuple[str, ...]
    """The endings of the names of its files."""


class SourceFile(NamedTuple):
    """A file of a source, or a data set of Lance, which is a folder."""

    filesystem: fs.FileSystem
    path: str
    """Its path in the words of the filesystem."""
    shown: str
    """Its path as messages show it."""
    endpoint: str | None
    """The address of its S3 server, if that is not AWS."""
    version: LanceVersion | None
    """The version that is read of a data set of Lance."""

    def size(self) -> int:
        """Return its size in bytes."""
        return int(self.filesystem.get_file_info(self.path).size)


def open_lance_table(file: SourceFile) -> LanceTable:
    """Open a data set of Lance at its version. Raises ConfigError if there is none."""
    dataset = open_dataset(
        file.filesystem, file.path, file.shown, endpoint=file.endpoint, version=file.version
    )
    return LanceTable(file.filesystem, dataset, file.path, file.shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFiles:
    """The files of a source, which are all of one kind."""

    filesystem: fs.FileSystem
    form: FileFormat
    splits: dict[SplitName, list[str]]
    """The files of both splits; empty if the source is not split."""
    files: list[str]
    """All files, in the order of their paths."""
    root: str
    """The folder of the files, or the only file."""
    endpoint: str | None = None
    version: str | None = None
    """The number or tag of the version that the source names."""
    versions: Mapping[str, LanceVersion] = field(default_factory=dict)
    """The version that is read of each data set of Lance, by its `address`."""

    def file(self, path: str) -> SourceFile:
        """Return what is needed to open the file at a path."""
        version = self.versions.get(self.address(path))
        return SourceFile(self.filesystem, path, self.shown(path), self.endpoint, version)

    def address(self, path: str) -> str:
        """Return the path of a file as messages show it, with the version that the source names."""
        return self.shown(path) + (f"@{self.version}" if self.version else "")

    def shown(self, path: str) -> str:
        """Return the path of a file as messages show it."""
        return path if isinstance(self.filesystem, fs.LocalFileSystem) else f"s3://{path}"


def find_files(
    source: str,
    endpoint: str | None,
    formats: Sequence[FileFormat],
    *,
    kind: str,
    keys: tuple[str, str] = SOURCE_KEYS,
    reads_tests: bool = False,
    versions: Mapping[str, LanceVersion] | None = None,
) -> SplitFiles:
    """Find the files of a source. `kind` is what the source should be, for messages, such as `table`.

    `keys` name source and endpoint in messages. Files of `test` are left out unless `reads_tests`.

    A path with `*` or `?` is a pattern: `part-*.parquet` are all files of a folder with such names.
    Of a data set of Lance, the version is read that `versions` have for its address; else the one that the
    source names, as in `photos.lance@3`; else the newest one.

    Raises ConfigError if there are none, if they are of several kinds, and if some of them belong to a split
    and others do not.
    """
    address, version = split_version(source)
    filesystem, path = open_filesystem(address, endpoint, names=keys)
    root = folder_of(path)
    info = find_root(address, filesystem, root, endpoint)
    is_one = info.type == fs.FileType.File or is_dataset(filesystem, root)
    if is_one:
        files, hints = [root], PurePosixPath(root).name
    else:
        infos = list_all(filesystem, root)
        found = [
            path_found
            for path_found in rows_at(root, infos)
            if root == path or matches(path_found, path)
        ]
        files = [
            path
            for path in found
            if format_of(path, formats)
            and (reads_tests or UNUSED not in _words(path, root))
            and not is_left_out(path, root)
            and not _is_of_datasets(path)
        ]
        hints = f"files: {', '.join(PurePosixPath(path).name for path in found[:5]) or 'none'}"
    kinds_found = {format_of(path, formats) for path in files}
    if not files or None in kinds_found:
        known = "; ".join(f"{each.description} ({', '.join(each.suffixes)})" for each in formats)
        raise ConfigError(
            f"{keys[0]} = {source} is no {kind} ({hints}).\n       A {kind} is {known}."
        )
    if len(kinds_found) > 1:
        names = ", ".join(sorted(each.name for each in kinds_found if each))
        raise ConfigError(
            f"{keys[0]} = {source} has files of several kinds: {names}. Use one of them."
        )
    form = kinds_found.pop()
    assert form is not None
    if not is_one and any(map(is_parquet, files)):
        refuse_versioned(filesystem, root, infos)
    splits = _splits_of(source, root, files)
    split_files = SplitFiles(
        filesystem=filesystem,
        form=form,
        splits=splits,
        files=files,
        root=root,
        endpoint=endpoint,
        version=version,
    )
    if form.suffixes != (SUFFIX,):
        return split_files
    return replace(split_files, versions=_versions_of(split_files, versions or {}))


def rows_at(root: str, infos: Sequence[fs.FileInfo]) -> list[str]:
    """Return the paths of the files below a root, in order; of a data set of Lance that of its folder."""
    datasets = lance_folders(root, infos)
    inside = tuple(f"{folder}/" for folder in datasets)
    files = [
        each.path
        for each in infos
        if each.type == fs.FileType.File and not each.path.startswith(inside)
    ]
    return sorted([*files, *datasets])


def _versions_of(found: SplitFiles, known: Mapping[str, LanceVersion]) -> dict[str, LanceVersion]:
    """Return the version to read of each data set of Lance: the known one, that of the source, or the newest.

    Raises ConfigError if there is no such version.
    """
    versions = {}
    for path in found.files:
        address = found.address(path)
        dataset = open_dataset(
            found.filesystem,
            path,
            found.shown(path),
            endpoint=found.endpoint,
            version=known.get(address, found.version),
        )
        versions[address] = version_of(dataset)
    return versions


def _splits_of(source: str, root: str, files: Sequence[str]) -> dict[SplitName, list[str]]:
    splits: dict[SplitName, list[str]] = {"train": [], "valid": []}
    others: list[str] = []
    for file in files:
        split = next((SPLITS[word] for word in _words(file, root) if word in SPLITS), None)
        (splits[split] if split else others).append(file)
    if not all(splits.values()):
        return {}
    if others:
        raise ConfigError(
            f"data.source = {source}: {others[0]} belongs to no split, and other files are named "
            "train and valid. Rename it, or move it."
        )
    return splits


def folder_of(pattern: str) -> str:
    """Return the folder that holds all files of a pattern; a path without wildcards is its own."""
    parts = pattern.split("/")
    fixed = takewhile(lambda part: not WILDCARDS & {*part}, parts)
    return "/".join(fixed)


def matches(path: str, pattern: str) -> bool:
    """Return whether the path of a file has as many parts as a pattern, and each matches its own."""
    parts, patterns = path.split("/"), pattern.replace("[", "[[]").split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def format_of(path: str, formats: Sequence[FileFormat]) -> FileFormat | None:
    """Return the format of a file by the ending of its name; None if it is none of these."""
    return next((each for each in formats if path.lower().endswith(each.suffixes)), None)


def _words(path: str, root: str) -> list[str]:
    """Return the first word of each folder and of the name of a file below a root, in lower case."""
    below = path.removeprefix(root).strip("/") or PurePosixPath(path).name
    parts = [part.lower().removeprefix(f"{SPLIT_COLUMN}=") for part in below.split("/")]
    return [re.split(r"[-_.]", part)[0] for part in parts]


def _is_of_datasets(path: str) -> bool:
    """Return whether the library `datasets` has written a file for itself, beside those of a data set."""
    name = PurePosixPath(path).name
    return name.startswith("cache-") or name in DATASETS_FILES
