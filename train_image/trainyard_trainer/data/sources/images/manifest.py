"""Manifests of image files: CSV or JSON Lines with a path and a label in each line."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.sources.column_types import MISSING
from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.images.image_files import ImageFiles
from trainyard_trainer.data.sources.images.samples import ImageSource, Source
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.parts import (
    ALL,
    SPLIT_COLUMN,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.data.sources.text_header import (
    SEPARATORS,
    read_header,
    require_utf8_text,
    usual_separator,
)
from trainyard_trainer.errors import ConfigError

FRACTION = re.compile(r"-?\d*[.,]\d+([eE][-+]?\d+)?")
"""A number with a fraction, with a decimal point or a decimal comma."""


class ManifestLine(NamedTuple):
    """One line of a manifest: its values, or the reason why it cannot be used."""

    number: int
    values: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestLines:
    """The columns of a manifest that are used, and the problems of its rows."""

    files: list[str] = field(default_factory=list)
    """The file of each row; a manifest may be a folder of files."""
    numbers: list[int] = field(default_factory=list)
    paths: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    splits: list[Any] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)

    def where(self, row: int) -> str:
        """Return the file and line of a row, for an error message."""
        return f"{self.files[row]}, line {self.numbers[row]}"

    def take(self, rows: list[int]) -> ManifestLines:
        def at_rows(column: list[Any]) -> list[Any]:
            return [column[row] for row in rows]

        problems = {new: self.problems[row] for new, row in enumerate(rows) if row in self.problems}
        return ManifestLines(
            at_rows(self.files),
            at_rows(self.numbers),
            at_rows(self.paths),
            at_rows(self.labels),
            at_rows(self.splits),
            problems,
        )


def manifest_files(root: str, infos: Sequence[fs.FileInfo]) -> list[fs.FileInfo]:
    """Return the manifests in a folder that stands for one manifest, as Spark writes them: `all.csv/part-*`.

    They end as the folder does. Files whose names begin with `_` are left out, and so are empty ones.
    """
    suffix = PurePosixPath(root).suffix.lower()
    return [
        info
        for info in infos
        if info.type == fs.FileType.File
        and info.base_name.lower().endswith(suffix)
        and not info.base_name.startswith("_")
        and info.size
    ]


def open_manifest(source: ImageSource, files: Sequence[fs.FileInfo]) -> Source:
    """Open a manifest: one file, or the files of a folder in whose place they stand.

    Paths in it start at the folder in which the source lies. Raises ConfigError if a file lacks a column or
    has it twice, or is not UTF-8.
    """
    lines = ManifestLines()
    stamps = []
    for info in sorted(files, key=lambda each: each.path):
        with explained_errors(info.path), source.filesystem.open_input_stream(info.path) as stream:
            data = stream.read()
        stamps.append(data)
        _gather_file(lines, info.path, data, source)
    if len(lines.problems) == len(lines.numbers):
        first = lines.problems.get(0)
        why = "it is empty" if first is None else f"line {lines.numbers[0]}: {first}"
        raise ConfigError(f"{source.root} has no line that can be used: {why}.")
    lines.labels[:] = _clean_labels(lines, source.columns.label)
    return Source(
        path=source.path,
        kind="manifest of picture files",
        splits={
            name: _files_of_lines(source, lines.take(rows))
            for name, rows in _split_rows(source.path, lines, source.say).items()
        },
        stamp=stamp_of(*stamps),
    )


def _gather_file(lines: ManifestLines, file: str, data: bytes, source: ImageSource) -> None:
    """Add the lines of one file. Raises ConfigError."""
    require_utf8_text(file, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8: {error}. Save it as UTF-8.") from error
    is_json = file.lower().endswith((".jsonl", ".ndjson"))
    needed = source.columns
    found = _json_lines(text) if is_json else _csv_lines(text, file, needed, source.say)
    is_checked = False
    for number, values, problem in found:
        if problem is not None:
            lines.problems[len(lines.numbers)] = problem
        elif not is_checked:
            check_columns(file, values, *needed)
            is_checked = True
        lines.files.append(file)
        lines.numbers.append(number)
        lines.paths.append(values.get(needed.image))
        lines.labels.append(values.get(needed.label))
        lines.splits.append(values.get(SPLIT_COLUMN))


def _csv_lines(
    text: str, file: str, needed: tuple[str, str], say: Callable[[str], None]
) -> Iterator[ManifestLine]:
    """Read the lines of a CSV file. Its separator is the one that makes the needed columns of its header."""
    header = read_header(text, file, needed)
    if header.separator != usual_separator(file) and set(needed) <= set(header.columns):
        say(f"{file}: the columns are separated by {SEPARATORS[header.separator]}")
    lines = io.StringIO(text[header.start :], newline="")
    reader = csv.reader(lines, delimiter=header.separator, strict=True)
    skipped = 1 if header.start else 0
    try:
        names: list[str] = []
        for values in reader:
            number = reader.line_num + skipped
            if not values:
                continue
            if not names:
                names = values
                _refuse_repeated(file, names, needed)
            elif len(values) == len(names):
                yield ManifestLine(number, dict(zip(names, values, strict=True)))
            else:
                problem = (
                    f"it has {len(values)} values, where the first line has {len(names)} names"
                )
                yield ManifestLine(number, {}, problem)
    except csv.Error as error:
        raise ConfigError(f"{file}, line {reader.line_num + skipped}: {error}.") from error


def _refuse_repeated(file: str, names: Sequence[str], needed: tuple[str, str]) -> None:
    """Raise ConfigError if the header names a column twice that is read."""
    repeated = [name for name in (*needed, SPLIT_COLUMN) if names.count(name) > 1]
    if repeated:
        check_columns(file, names, *repeated)


def _json_lines(text: str) -> Iterator[ManifestLine]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            pairs = json.loads(line, object_pairs_hook=_Pairs)
            line.encode()
            json.dumps(pairs, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            yield ManifestLine(number, {}, f"it is no JSON: {error}")
            continue
        except UnicodeEncodeError:
            yield ManifestLine(number, {}, "it has an escape such as \\udce9 that is no character")
            continue
        if not isinstance(pairs, _Pairs):
            yield ManifestLine(number, {}, "it is no JSON object")
            continue
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            yield ManifestLine(number, {}, f"it has the key {repeated[0]} twice")
        else:
            yield ManifestLine(number, dict(pairs))


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of a JSON object, of which a dict would keep the last of a repeated key."""


def _split_rows(
    path: str, lines: ManifestLines, say: Callable[[str], None]
) -> dict[str, list[int]]:
    """Return the rows of each split. A line that cannot be read belongs to the first split."""
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
                f"{lines.where(rows[name][0])}: {SPLIT_COLUMN} is {name!r}, where "
                "train or valid is right."
            )
    chosen = choose_splits(rows, path, say)
    parts = {split: rows[name] for split, name in chosen.items()}
    first = next(iter(parts))
    parts[first] = sorted(parts[first] + unread)
    return parts


def _files_of_lines(source: ImageSource, lines: ManifestLines) -> ImageFiles:
    base = source.root.rpartition("/")[0]
    for row, path in enumerate(lines.paths):
        if not isinstance(path, str) or not path or "\0" in path:
            lines.problems.setdefault(row, f"its {source.columns.image} is {path!r}, and no path")
            lines.paths[row] = ""
    return ImageFiles(
        filesystem=source.filesystem,
        base=base,
        paths=lines.paths,
        labels=_of_one_type(lines, source.columns.label),
        manifests=[file.removeprefix(f"{base}/") for file in lines.files],
        lines=lines.numbers,
        problems=lines.problems,
    )


def _clean_labels(lines: ManifestLines, column: str) -> list[Any]:
    """Return the labels with None for missing ones, and as numbers if the first one of a CSV file is.

    Raises ConfigError for a CSV file whose first label is a number with a fraction.
    """
    labels = [None if label in MISSING else label for label in lines.labels]
    first = next((row for row, label in enumerate(labels) if label is not None), None)
    if first is None or lines.files[first].lower().endswith((".jsonl", ".ndjson")):
        return labels
    if FRACTION.fullmatch(str(labels[first]).strip()):
        raise ConfigError(
            f"{lines.where(first)}: {column} is {labels[first]}, a number with a fraction, where integers "
            "from 0 or "
            "names are right. Data frames write 0 as 0.0 if labels are missing: drop those rows, and convert "
            "the column to integers."
        )
    if not _is_number(str(labels[first])):
        return labels
    return [int(label) if label and _is_number(label) else label for label in labels]


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _of_one_type(lines: ManifestLines, column: str) -> pa.Array:
    """Return the labels as numbers or as names, like the first; the others are problems. Raises
    ConfigError."""
    known = [row for row, label in enumerate(lines.labels) if label is not None]
    first: Any = lines.labels[known[0]] if known else ""
    if type(first) not in (int, str):
        raise ConfigError(
            f"{lines.where(known[0])}: {column} is {first!r}, and neither a number "
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
