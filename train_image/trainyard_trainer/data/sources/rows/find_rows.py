"""Find the files of a table, and divide its rows into a split for training and one for validation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

import numpy as np
from pyarrow import fs

from trainyard_trainer.data.sources.find import KEYS, find_root
from trainyard_trainer.data.sources.listing import explained_errors, list_all
from trainyard_trainer.data.sources.rows.readers import FORMATS, format_of
from trainyard_trainer.data.sources.rows.row_source import JoinedRows, Row, RowSource
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

SPLITS: dict[str, Literal["train", "valid"]] = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
}
"""The split of a file, or of a folder, by the beginning of its name. Files of `test` are not read."""

UNUSED = "test"
"""The word at the beginning of the names of files and folders that are not read."""


@dataclass(frozen=True)
class TableSplit:
    """A split of a table: rows by their index, as PyTorch's map-style data sets have them."""

    rows: RowSource
    columns: tuple[str, ...]
    indices: np.ndarray
    """The numbers of its rows in the table."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return several rows at once."""
        return self.rows.read(self.indices[np.asarray(indices)].tolist(), self.columns)


def open_table(
    *,
    split: str,
    source: str,
    endpoint: str | None,
    columns: Sequence[str] | None,
    valid_share: float,
    seed: int,
) -> TableSplit:
    """Open a split of the table at a path. Raises ConfigError if there is no table.

    Files or folders named `train` and `valid` are the splits. Without them `valid_share` of the rows is for
    validation, chosen by the seed.
    """
    root, files = _files_of(source, endpoint)
    splits: dict[str | None, list[str]] = {"train": [], "valid": [], None: []}
    for file in files:
        splits[_split_of(file, root)].append(file)
    if splits["train"] and splits["valid"]:
        if splits[None]:
            raise ConfigError(
                f"data.source = {source}: {splits[None][0]} belongs to no split, and other files are named "
                "train and valid. Rename it, or move it."
            )
        rows = _open(source, endpoint, splits["valid" if split == "valid" else "train"])
        chosen: np.ndarray = np.arange(len(rows))
    else:
        rows = _open(source, endpoint, files, at_least=2)
        order = np.random.default_rng(seed).permutation(len(rows))
        held = min(max(1, round(valid_share * len(rows))), len(rows) - 1)
        chosen = np.sort(order[:held] if split == "valid" else order[held:])
    return TableSplit(rows, _require_columns(rows, columns), chosen)


def _files_of(source: str, endpoint: str | None) -> tuple[str, list[str]]:
    """Return the path of a source in its filesystem, and its files with a known suffix."""
    filesystem, root = open_filesystem(source, endpoint, names=KEYS)
    info = find_root(source, filesystem, root, endpoint)
    if info.type == fs.FileType.File:
        files, hints = [root], PurePosixPath(root).name
    else:
        infos = list_all(filesystem, root)
        found = [each.path for each in infos if each.type == fs.FileType.File]
        files = [
            path
            for path in found
            if format_of(path) and UNUSED not in _words(path, root) and not _is_cache(path)
        ]
        hints = f"files: {', '.join(PurePosixPath(path).name for path in found[:5]) or 'none'}"
    kinds_found = {format_of(path) for path in files}
    if not files or None in kinds_found:
        known = "; ".join(f"{each.description} ({', '.join(each.suffixes)})" for each in FORMATS)
        raise ConfigError(
            f"data.source = {source} is no table ({hints}).\n       A table is {known}."
        )
    if len(kinds_found) > 1:
        names = ", ".join(sorted(each.name for each in kinds_found if each))
        raise ConfigError(
            f"data.source = {source} has files of several kinds: {names}. Use one of them."
        )
    return root, files


def _words(path: str, root: str) -> list[str]:
    """Return the first word of each folder and of the name of a file below a root, in lower case."""
    below = path.removeprefix(root).strip("/") or PurePosixPath(path).name
    return [re.split(r"[-_.]", part.lower())[0] for part in below.split("/")]


def _is_cache(path: str) -> bool:
    """Return whether the library `datasets` has written a file for itself, beside those of a data set."""
    return PurePosixPath(path).name.startswith("cache-")


def _split_of(path: str, root: str) -> str | None:
    return next((SPLITS[word] for word in _words(path, root) if word in SPLITS), None)


def _open(
    source: str, endpoint: str | None, files: Sequence[str], *, at_least: int = 1
) -> RowSource:
    """Open files of one kind with the same columns."""
    filesystem, _ = open_filesystem(source, endpoint, names=KEYS)
    parts: list[RowSource] = []
    for path in files:
        shown = path if isinstance(filesystem, fs.LocalFileSystem) else f"s3://{path}"
        found = format_of(path)
        assert found is not None
        with explained_errors(shown, kind=f"{found.name} file"):
            part = found.open(filesystem, path, shown)
        if parts and part.columns != parts[0].columns:
            raise ConfigError(
                f"{shown} has the columns {_shown(part)}, and {parts[0].path} has {_shown(parts[0])}. All "
                "files of a table need the same columns with the same types."
            )
        parts.append(part)
    rows = JoinedRows(source, parts) if len(parts) > 1 else parts[0]
    if len(rows) < at_least:
        raise ConfigError(
            f"data.source = {source} has {len(rows)} rows, and needs {at_least} or more"
        )
    return rows


def _shown(rows: RowSource) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in rows.columns.items())


def _require_columns(rows: RowSource, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns to read. Raises ConfigError for one that the table lacks."""
    if columns is None:
        return tuple(rows.columns)
    missing = [name for name in columns if name not in rows.columns]
    if missing:
        raise ConfigError(
            f"data.columns: {rows.path} has no column {missing[0]}, but {', '.join(rows.columns)}"
        )
    return tuple(columns)
