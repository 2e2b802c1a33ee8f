"""Find the files of a table, and divide its rows into a split for training and one for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.rows.readers import FORMATS, RowFormat
from trainyard_trainer.data.sources.rows.row_source import JoinedRows, Row, RowSource
from trainyard_trainer.data.sources.rows.split_files import SplitFiles, find_files
from trainyard_trainer.errors import ConfigError


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
    found = find_files(source, endpoint, FORMATS, kind="table")
    if found.splits:
        rows = _open(source, found, found.splits["valid" if split == "valid" else "train"])
        chosen: np.ndarray = np.arange(len(rows))
    else:
        rows = _open(source, found, found.files, at_least=2)
        order = np.random.default_rng(seed).permutation(len(rows))
        held = min(max(1, round(valid_share * len(rows))), len(rows) - 1)
        chosen = np.sort(order[:held] if split == "valid" else order[held:])
    return TableSplit(rows, _require_columns(rows, columns), chosen)


def _open(source: str, found: SplitFiles, files: Sequence[str], *, at_least: int = 1) -> RowSource:
    """Open files of one kind with the same columns."""
    assert isinstance(found.form, RowFormat)
    parts: list[RowSource] = []
    for path in files:
        shown = found.shown(path)
        with explained_errors(shown, kind=f"{found.form.name} file"):
            part = found.form.open(found.filesystem, path, shown)
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
