"""Inspect a table: the rows of its splits, its columns with their values, and its first rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainyard_trainer.data.sources.rows.find_rows import open_files
from trainyard_trainer.data.sources.rows.held_memory import HeldMemory
from trainyard_trainer.data.sources.rows.readers import FORMATS
from trainyard_trainer.data.sources.rows.row_source import FileRows, values_of
from trainyard_trainer.data.sources.rows.split_files import find_files
from trainyard_trainer.errors import ConfigError, DatasetError
from trainyard_trainer.terminal import table_text
from trainyard_trainer.tools.inspection.columns import ColumnDescription, describe_column

UNBOUNDED = HeldMemory(math.inf)
"""The memory of this command, which looks at a table once."""

READ_ROWS = 100_000
"""The largest number of rows whose values are looked at, the first ones of each split."""

SHOWN_ROWS = 3
"""The number of rows that are printed."""

CELL_CHARACTERS = 28
"""The largest number of characters of a value in a printed row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDescription:
    """The description of a table."""

    path: str
    kind: str
    """The kind of its files."""
    splits: dict[str, dict[str, int]]
    """The number of files and rows of each split; the only one is `all` if the files are not split."""
    columns: tuple[ColumnDescription, ...]
    read_rows: int
    """The number of rows whose values were looked at."""
    refused: tuple[str, ...]
    """Why samples cannot be made of columns, or of rows."""
    rows: tuple[dict[str, str], ...]
    """The first rows, shortened."""

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "splits": self.splits,
            "columns": [column.to_json() for column in self.columns],
            "read_rows": self.read_rows,
            "refused": list(self.refused),
            "rows": list(self.rows),
        }

    def to_text(self) -> str:
        """Return the description as text."""
        splits = [
            [name, f"{found['rows']:,}", f"{found['files']:,}"]
            for name, found in self.splits.items()
        ]
        columns = [
            [column.name, column.type, f"{column.missing:,}", column.contents()]
            for column in self.columns
        ]
        names = [column.name for column in self.columns]
        rows = [[row[name] for name in names] for row in self.rows]
        total = sum(found["rows"] for found in self.splits.values())
        read = "" if self.read_rows == total else f", of the first {self.read_rows:,} rows"
        parts = [
            f"{self.path}: a table ({self.kind})",
            table_text(["split", "rows", "files"], splits),
            table_text([f"{len(names)} columns{read}", "type", "missing", "values"], columns),
            table_text(names, rows),
            *(f"refused: {reason}" for reason in self.refused),
        ]
        return "\n\n".join(parts)


def is_table(source: str, endpoint: str | None, image_column: str) -> bool:
    """Return whether a source is a table that has no column with images."""
    try:
        found = find_files(source, endpoint, FORMATS, kind="table")
    except ConfigError:
        return False  # The readers of images say what is wrong with it.
    return image_column not in open_files(found, found.files[:1], UNBOUNDED)[0].columns


def look_at_table(source: str, endpoint: str | None) -> TableDescription:
    """Return the description of a table. Raises ConfigError if there is none."""
    found = find_files(source, endpoint, FORMATS, kind="table")
    splits = found.splits
    files = [(str(name), splits[name]) for name in splits] or [("all", found.files)]
    parts = {name: open_files(found, of_split, UNBOUNDED) for name, of_split in files}
    tables = [_first_rows(of_split, READ_ROWS) for of_split in parts.values()]
    table = pa.concat_tables(tables)
    types = next(iter(parts.values()))[0].columns
    return TableDescription(
        path=source,
        kind=found.form.name,
        splits={
            name: {"rows": sum(map(len, of_split)), "files": len(of_split)}
            for name, of_split in parts.items()
        },
        columns=tuple(describe_column(name, table.column(name), types[name]) for name in types),
        read_rows=len(table),
        refused=tuple(_refused(table, source)),
        rows=tuple(_shown(row) for row in table.slice(0, SHOWN_ROWS).to_pylist()),
    )


def _first_rows(parts: Sequence[FileRows], count: int) -> pa.Table:
    """Return the first rows of several files."""
    tables = []
    for part in parts:
        tables.append(part.first(count))
        count -= len(tables[-1])
        if not count:
            break
    return pa.concat_tables(tables)


def _refused(table: pa.Table, source: str) -> list[str]:
    """Return why samples cannot be made of the columns, with the remedies."""
    reasons = []
    for name in table.column_names:
        try:
            values_of(table.column(name), source, name, range(len(table)))
        except DatasetError as error:
            reasons.append(str(error).removeprefix(f"{source}: "))
    return reasons


def _shown(row: dict[str, Any]) -> dict[str, str]:
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: object) -> str:
    """Return a value of a row in one short line."""
    match value:
        case None:
            return "-"
        case bytes():
            return f"{len(value):,} bytes"
        case dict() if isinstance(value.get("bytes"), bytes):
            return f"{len(value['bytes']):,} bytes"
        case float():
            text = f"{value:.6g}"
        case str():
            text = " ".join(value.split())
        case _:
            text = " ".join(str(value).split())
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"
