"""Manifests of image files: CSV or JSON Lines with a path and a label in each line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.image_files import ImageFiles
from trainyard_trainer.data.sources.samples import (
    ALL,
    Source,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.errors import ConfigError

SPLIT_COLUMN = "split"

NO_FILE = "there is no such file"


class ManifestLine(NamedTuple):
    """One line of a manifest: its values, or the reason why it cannot be used."""

    number: int
    values: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestLines:
    """The columns of a manifest that are used, and the problems of its rows."""

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
    """Open a manifest. Raises ConfigError if it lacks a column, or is not UTF-8."""
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
    """Collect the lines. Raises ConfigError if no line can be used, or if columns are missing."""
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
) -> ImageFiles:
    for row, path in enumerate(lines.paths):
        if not isinstance(path, str) or not path:
            lines.problems.setdefault(row, f"its {image_column} is {path!r}, and no path")
            lines.paths[row] = ""
    return ImageFiles(
        filesystem=filesystem,
        base=file.rpartition("/")[0],
        paths=lines.paths,
        labels=_of_one_type(lines, file, label_column),
        manifest=file.rpartition("/")[2],
        lines=lines.numbers,
        problems=lines.problems,
    )


def _read_numbers(labels: list[str | None]) -> list[Any]:
    """Turn the labels of a CSV file into numbers if the first label is a number."""
    first = next((label for label in labels if label), "")
    if not _is_number(first):
        return [label or None for label in labels]
    return [int(label) if label and _is_number(label) else label or None for label in labels]


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _of_one_type(lines: ManifestLines, file: str, column: str) -> pa.Array:
    """Return the labels as numbers or as names, like the first; the others are problems. Raises
    ConfigError."""
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
