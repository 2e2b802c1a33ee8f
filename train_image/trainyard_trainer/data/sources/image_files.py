"""Picture files: a folder with a sub-folder per class, or a CSV or JSONL manifest of paths and labels."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.image_codec import EXTENSIONS
from trainyard_trainer.data.sources.samples import (
    ALL,
    SPLIT_NAMES,
    TRAIN,
    ReadImages,
    SampleLocation,
    Source,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.errors import ConfigError, RunError

SPLIT_COLUMN = "split"

NO_FILE = "there is no such file"


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFiles:
    """Samples each of which has a file of its own."""

    filesystem: fs.FileSystem
    base: str
    """What the paths are relative to."""
    paths: Sequence[str]
    labels: pa.Array
    num_bytes: int | None = None
    manifest: str | None = None
    lines: Sequence[int] = ()
    """Of the manifest, one per row."""
    problems: dict[int, str] = field(default_factory=dict)
    pixel_shape: None = None
    is_random_access: bool = True

    def where(self, row: int) -> SampleLocation:
        if self.manifest is None:
            return SampleLocation(self.paths[row])
        return SampleLocation(self.manifest, self.lines[row], "line")

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        images: list[bytes] = []
        problems: dict[int, str] = {}
        for place, found in enumerate(pool.map(self._read, rows.tolist())):
            if isinstance(found, str):
                problems[place] = found
            images.append(b"" if isinstance(found, str) else found)
        return ReadImages(images, problems)

    def _read(self, row: int) -> bytes | str:
        """A picture file, or why there is none. Raises RunError if the storage does not answer."""
        path = self._full_path(self.paths[row])
        prefix = f"{self.paths[row]}: " if self.manifest else ""
        try:
            with self.filesystem.open_input_stream(path, compression=None) as stream:
                data = stream.read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return f"{prefix}{NO_FILE}"
        except OSError as error:
            if not self._is_file(path):
                return f"{prefix}{NO_FILE}"
            raise RunError(f"{path} cannot be read: {error}") from error
        return data or f"{prefix}it is empty"

    def _full_path(self, path: str) -> str:
        if isinstance(self.filesystem, fs.LocalFileSystem):
            return str(PurePosixPath(self.base, path))
        return path.removeprefix("s3://") if path.startswith("s3://") else f"{self.base}/{path}"

    def _is_file(self, path: str) -> bool:
        return self.filesystem.get_file_info(path).type == fs.FileType.File


# A folder with a sub-folder per class.


def open_folder(
    path: str,
    filesystem: fs.FileSystem,
    root: str,
    infos: Sequence[fs.FileInfo],
    say: Callable[[str], None],
) -> Source:
    """`infos` are all files and folders below the root. Raises ConfigError for an empty class."""
    pictures = sorted((info for info in infos if _is_picture(info)), key=lambda info: info.path)
    others = sum(info.type == fs.FileType.File for info in infos) - len(pictures)
    if others:
        say(f"{path}: left out are files whose names are not those of pictures: {others}")
    splits = _find_splits(path, root, _top_folders(root, infos), pictures, say)
    return Source(
        path=path,
        kind="folder of pictures, a sub-folder per class",
        splits={
            name: _files_of_classes(filesystem, root, below, infos, pictures)
            for name, below in splits.items()
        },
        stamp=stamp_of([(info.path, info.size) for info in pictures]),
    )


def _find_splits(
    path: str,
    root: str,
    folders: Sequence[str],
    pictures: Sequence[fs.FileInfo],
    say: Callable[[str], None],
) -> dict[str, str]:
    """What the paths of each part begin with.

    `train` is a part if its pictures lie in sub-folders of it; with pictures of its own it is a class.
    """
    parents = [info.path.removeprefix(f"{root}/").split("/")[:-1] for info in pictures]
    classes = {names[0] for names in parents if len(names) == 1}
    named = [name for name in folders if is_split_name(name) and name not in classes]
    others = [name for name in folders if name not in named]
    if not named or (others and not any(name.lower() in SPLIT_NAMES[TRAIN] for name in named)):
        return {ALL: ""}
    if others:
        say(f"{path}: left out beside {', '.join(named)}: {', '.join(others)}")
    chosen = choose_splits(named, path, say)
    return {split: f"{folder}/" for split, folder in chosen.items()}


def _files_of_classes(
    filesystem: fs.FileSystem,
    root: str,
    below: str,
    infos: Sequence[fs.FileInfo],
    pictures: Sequence[fs.FileInfo],
) -> PictureFiles:
    """`below` is the sub-folder of the split: `train/`."""
    chosen = [info for info in pictures if info.path.startswith(f"{root}/{below}")]
    paths = [info.path.removeprefix(f"{root}/") for info in chosen]
    labels = [path.removeprefix(below).partition("/")[0] for path in paths]
    empty = set(_top_folders(f"{root}/{below}".rstrip("/"), infos)) - set(labels)
    if empty:
        raise ConfigError(
            f"{root}/{below}{min(empty)} has no picture: each sub-folder is a class. "
            f"Pictures are files that end in {', '.join(EXTENSIONS)}. Remove it, or add some."
        )
    return PictureFiles(
        filesystem=filesystem,
        base=root,
        paths=paths,
        labels=pa.array(labels, pa.string()),
        num_bytes=sum(info.size for info in chosen),
    )


def _is_picture(info: fs.FileInfo) -> bool:
    return info.type == fs.FileType.File and info.path.lower().endswith(EXTENSIONS)


def _top_folders(root: str, infos: Iterable[fs.FileInfo]) -> list[str]:
    """Names of the folders right below the root. An object store has them in the names of files alone."""
    names = set()
    for info in infos:
        if not info.path.startswith(f"{root}/"):
            continue
        first, slash, _ = info.path.removeprefix(f"{root}/").partition("/")
        if slash or info.type == fs.FileType.Directory:
            names.add(first)
    return sorted(names)


def has_classes(root: str, infos: Sequence[fs.FileInfo]) -> bool:
    """Whether pictures lie in sub-folders."""
    depth = root.count("/") + 1
    return any(_is_picture(info) and info.path.count("/") > depth for info in infos)


# A manifest.


class ManifestLine(NamedTuple):
    """One line of a manifest: what it holds, or why that cannot be said."""

    number: int
    values: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestLines:
    """The columns of a manifest that matter, and what is wrong by row."""

    numbers: list[int] = field(default_factory=list)
    paths: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    splits: list[Any] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)

    def take(self, rows: list[int]) -> ManifestLines:
        def at_rows(column: list[Any]) -> list[Any]:
            return [column[row] for row in rows]

        problems = {new: self.problems[row] for new, row in enumerate(rows) if row in self.problems}
        return ManifestLines(
            at_rows(self.numbers),
            at_rows(self.paths),
            at_rows(self.labels),
            at_rows(self.splits),
            problems,
        )


def open_manifest(
    path: str,
    filesystem: fs.FileSystem,
    file: str,
    image_column: str,
    label_column: str,
    say: Callable[[str], None],
) -> Source:
    """Raises ConfigError if there are no such columns."""
    with filesystem.open_input_stream(file) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8: {error}.") from error
    is_json = file.lower().endswith((".jsonl", ".ndjson"))
    found = _json_lines(text) if is_json else _csv_lines(text, file)
    lines = _gather(found, file, image_column, label_column)
    if not is_json:
        lines.labels[:] = _read_numbers(lines.labels)
    return Source(
        path=path,
        kind="manifest of picture files",
        splits={
            name: _files_of_lines(filesystem, file, lines.take(rows), image_column, label_column)
            for name, rows in _split_rows(path, file, lines, say).items()
        },
        stamp=stamp_of(data),
    )


def _gather(
    found: Iterator[ManifestLine], file: str, image_column: str, label_column: str
) -> ManifestLines:
    """Raises ConfigError if no line can be used, or the first that can has not the columns."""
    lines = ManifestLines()
    is_checked = False
    for row, (number, values, problem) in enumerate(found):
        if problem is not None:
            lines.problems[row] = problem
        elif not is_checked:
            check_columns(file, values, image_column, label_column)
            is_checked = True
        lines.numbers.append(number)
        lines.paths.append(values.get(image_column))
        lines.labels.append(values.get(label_column))
        lines.splits.append(values.get(SPLIT_COLUMN))
    if not is_checked:
        why = f"line {lines.numbers[0]}: {lines.problems[0]}" if lines.numbers else "it is empty"
        raise ConfigError(f"{file} has no line that can be used: {why}.")
    return lines


IMAGE_COLUMNS = (
    "Set data.image_column and data.label_column (--image-column and --label-column of "
    "`trainyard data`)."
)


def check_columns(
    file: str, found: Iterable[str], *needed: str, remedy: str = IMAGE_COLUMNS
) -> None:
    """Raises ConfigError that names the nearest column."""
    names = list(found)
    for column in needed:
        if column in names:
            continue
        near = difflib.get_close_matches(column, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{file} has no column {column}: it has {', '.join(names)}.{hint} {remedy}"
        )


def _csv_lines(text: str, file: str) -> Iterator[ManifestLine]:
    delimiter = "\t" if file.lower().endswith(".tsv") else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        for values in reader:
            if not values:
                continue
            if len(values) == len(names):
                yield ManifestLine(reader.line_num, dict(zip(names, values, strict=True)))
            else:
                problem = (
                    f"it has {len(values)} values, where the first line has {len(names)} names"
                )
                yield ManifestLine(reader.line_num, {}, problem)
    except csv.Error as error:
        raise ConfigError(f"{file}, line {reader.line_num}: {error}.") from error


def _json_lines(text: str) -> Iterator[ManifestLine]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            yield ManifestLine(number, {}, f"it is no JSON: {error}")
            continue
        if isinstance(values, dict):
            yield ManifestLine(number, values)
        else:
            yield ManifestLine(number, {}, "it is no JSON object")


def _split_rows(
    path: str, file: str, lines: ManifestLines, say: Callable[[str], None]
) -> dict[str, list[int]]:
    """Rows of each part. A line that cannot be read belongs to the first one."""
    rows: dict[Any, list[int]] = {}
    for row, name in enumerate(lines.splits):
        rows.setdefault(name, []).append(row)
    unread = [row for row in rows.get(None, []) if row in lines.problems]
    if len(rows.get(None, [])) == len(lines.splits):
        return {ALL: rows[None]}
    if len(unread) == len(rows.get(None, [])):
        rows.pop(None, None)
    for name in rows:
        if not isinstance(name, str) or not is_split_name(name):
            raise ConfigError(
                f"{file}, line {lines.numbers[rows[name][0]]}: {SPLIT_COLUMN} is {name!r}, where "
                "train or valid is right."
            )
    chosen = choose_splits(rows, path, say)
    parts = {split: rows[name] for split, name in chosen.items()}
    first = next(iter(parts))
    parts[first] = sorted(parts[first] + unread)
    return parts


def _files_of_lines(
    filesystem: fs.FileSystem, file: str, lines: ManifestLines, image_column: str, label_column: str
) -> PictureFiles:
    for row, path in enumerate(lines.paths):
        if not isinstance(path, str) or not path:
            lines.problems.setdefault(row, f"its {image_column} is {path!r}, and no path")
            lines.paths[row] = ""
    return PictureFiles(
        filesystem=filesystem,
        base=file.rpartition("/")[0],
        paths=lines.paths,
        labels=_of_one_type(lines, file, label_column),
        manifest=file.rpartition("/")[2],
        lines=lines.numbers,
        problems=lines.problems,
    )


def _read_numbers(labels: list[str | None]) -> list[Any]:
    """A CSV has text alone: labels are numbers if the first is one."""
    first = next((label for label in labels if label), "")
    if not _is_number(first):
        return [label or None for label in labels]
    return [int(label) if label and _is_number(label) else label or None for label in labels]


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _of_one_type(lines: ManifestLines, file: str, column: str) -> pa.Array:
    """Numbers or names, as the first label is; others are problems. Raises ConfigError."""
    known = [row for row, label in enumerate(lines.labels) if label is not None]
    first: Any = lines.labels[known[0]] if known else ""
    if type(first) not in (int, str):
        raise ConfigError(
            f"{file}, line {lines.numbers[known[0]]}: {column} is {first!r}, and neither a number "
            "from 0 nor a name."
        )
    word = "name" if isinstance(first, str) else "number"
    labels = list(lines.labels)
    for row in known:
        label = labels[row]
        if type(label) is not type(first) or (word == "number" and abs(label) >= 2**63):
            lines.problems.setdefault(
                row, f"its {column} is {label!r}, which is no {word} of a class"
            )
            labels[row] = None
    return pa.array(labels, pa.string() if word == "name" else pa.int64())
