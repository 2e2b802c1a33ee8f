"""The rows of a run of `gradient_boosting`: what the driver must know of them, and each worker's share.

Rows have numbers: by their files' paths, and by their places in them. Which are kept for validation follows
from a row's number and the seed alone, and of each part worker r of W has each W-th row from the r-th on. So
the same rows come to the same worker in the same order each time, and a table in the order of its labels is
spread evenly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.config.boosting import Boosting
from trainyard_trainer.config.data import Table
from trainyard_trainer.config.data_sources import BUILT_IN
from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.find import KEYS, list_all
from trainyard_trainer.data.sources.samples import ALL, TRAIN, VALID, stamp_of
from trainyard_trainer.data.sources.tables import split_files
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.storage import open_filesystem

MOST_CLASSES = 1000
"""More different labels than these are no classes, but numbers to be learnt by `regression`."""

BLOCK_ROWS = 2**18
"""Rows in memory beside the share: of a file's row group, which may be larger, at most so many at once."""

SHOWN = 5

SPOILT = re.compile(r'[\s"\',:\[\]{}<>]+')
"""What one of the libraries does not take in the name of a column."""

COLUMNS = "Set data.label_column and data.feature_columns."

Label = int | float | str
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file; of a built-in data set its name."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows for training, or those for validation."""

    source: str
    files: tuple[File, ...]
    is_valid: bool
    share: float | None
    """Of the files' rows that are for validation; None where all are of this part."""
    seed: int
    rows: int = 0

    def mask(self, first: int, count: int) -> np.ndarray:
        """Which of so many rows of the files, from the first on, are of this part: (count,) bool."""
        if self.share is None:
            return np.ones(count, bool)
        drawn = uniform(self.seed, np.arange(first, first + count)) < self.share
        return drawn if self.is_valid else ~drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a worker holds of a part."""

    features: np.ndarray
    """(N, columns) float32; NaN where there is nothing."""
    labels: np.ndarray
    """(N,) float32: of classes their numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTable:
    """A table that a run can learn from; goes over the network."""

    source: str
    endpoint: str | None
    label: str
    classes: tuple[Label, ...]
    """In order; empty for a regression."""
    columns: tuple[str, ...]
    """That are learnt from."""
    train: Part
    valid: Part

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The columns as the model calls them."""
        return tuple(SPOILT.sub("_", column) for column in self.columns)

    @property
    def stamp(self) -> str:
        """A fingerprint of the files."""
        return stamp_of(
            [(file.path, file.rows, file.size) for file in (*self.train.files, *self.valid.files)]
        )

    def to_json(self) -> dict[str, Any]:
        """What whoever uses the model must know of its input."""
        return {
            "kind": "table",
            "source": self.source,
            "label": self.label,
            "classes": list(self.classes),
            "columns": list(self.columns),
            "feature_names": list(self.feature_names),
            "stamp": self.stamp,
        }


def prepare(data: Table, train: Boosting, endpoint: str | None, say: Say) -> PreparedTable:
    """Look through the files: columns, classes, and how many rows there are.

    Raises ConfigError for what cannot be learnt from.
    """
    endpoint = data.endpoint or endpoint
    found = _find(data.source, endpoint, say)
    share: float | None = None
    if data.valid_source is not None:
        valid_files = tuple(
            each for files in _find(data.valid_source, endpoint, say).values() for each in files
        )
        files = tuple(each for files in found.values() for each in files)
    elif VALID in found:
        files, valid_files = found[TRAIN], found[VALID]
    else:
        files = valid_files = found[ALL]
        share = data.valid_share
    parts = {
        is_valid: Part(
            source=data.valid_source if is_valid and data.valid_source else data.source,
            files=chosen,
            is_valid=is_valid,
            share=share,
            seed=train.seed,
        )
        for is_valid, chosen in ((False, files), (True, valid_files))
    }
    columns = _columns(parts.values(), data, endpoint)
    classes: tuple[Label, ...] = ()
    if train.objective != "regression":
        classes = _classes(parts[False], data.label_column, train.objective, endpoint)
    counted = [_counted(part, data.label_column, classes, endpoint) for part in parts.values()]
    table = PreparedTable(
        source=data.source,
        endpoint=endpoint,
        label=data.label_column,
        classes=classes,
        columns=columns,
        train=counted[0],
        valid=counted[1],
    )
    if len(set(table.feature_names)) < len(columns):
        twice = sorted(name for name in table.feature_names if table.feature_names.count(name) > 1)
        raise ConfigError(
            f"{data.source} has columns whose names differ by blanks or brackets alone, which the model "
            f"cannot tell apart: {twice[0]}. Rename one, or name others in data.feature_columns."
        )
    return table


def check_shares(table: PreparedTable, workers: int) -> None:
    """Raises ConfigError if a worker would have no row: it would keep the others waiting for nothing."""
    for name, part in (("training", table.train), ("validation", table.valid)):
        if part.rows < workers:
            raise ConfigError(
                f"{part.source} has {part.rows} rows for {name}, and each of {workers} workers needs one. "
                "Use fewer workers, another data.valid_share, or more rows."
            )


def read_share(table: PreparedTable, part: Part, rank: int, workers: int) -> Rows:
    """Each so many-th row of a part, from the rank-th on."""
    features, labels = [], []
    passed = 0  # rows of the part before this block
    for first, block in _blocks(part, [*table.columns, table.label], table.endpoint):
        mask = part.mask(first, block.num_rows)
        numbers = passed + np.cumsum(mask) - 1
        passed += int(mask.sum())
        mine = block.filter(pa.array(mask & (numbers % workers == rank)))
        features.append(np.stack([_numbers(mine[column]) for column in table.columns], axis=1))
        labels.append(_labels(mine[table.label], table.classes))
    return Rows(features=np.concatenate(features), labels=np.concatenate(labels))


def uniform(seed: int, rows: np.ndarray) -> np.ndarray:
    """A number from 0 to 1 for each row, by its number and the seed alone: (N,) float64.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), twice.
    """
    with np.errstate(over="ignore"):
        mixed = _mixed(np.array([seed], np.uint64)) + rows.astype(np.uint64)
        return (_mixed(mixed) >> np.uint64(11)) * 2.0**-53


def _mixed(numbers: np.ndarray) -> np.ndarray:
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# Files.


def _find(source: str, endpoint: str | None, say: Say) -> dict[str, tuple[File, ...]]:
    """The files of a source by the part that they are of. Raises ConfigError if there are none."""
    if source in BUILT_IN:
        table = _built_in(source)
        return {ALL: (File(source, table.num_rows, table.nbytes),)}
    filesystem, root = open_filesystem(source, endpoint, names=KEYS)
    info = filesystem.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"there is no {source}" + (f" at {endpoint}." if endpoint else "."))
    infos = [info] if info.type == fs.FileType.File else list_all(filesystem, root)
    files = [_open(filesystem, each) for each in infos if each.base_name.endswith(".parquet")]
    if not files:
        raise ConfigError(
            f"{source} has no Parquet files, which end in .parquet: train.recipe = gradient_boosting learns "
            "from nothing else."
        )
    folder = root.rpartition("/")[0] if info.type == fs.FileType.File else root
    split = split_files(source, folder, files, say)
    if ALL not in split and not {TRAIN, VALID} <= split.keys():
        split = {ALL: files}
    return {name: tuple(chosen) for name, chosen in split.items()}


def _open(filesystem: fs.FileSystem, info: fs.FileInfo) -> File:
    try:
        with filesystem.open_input_file(info.path) as stream:
            return File(info.path, pq.read_metadata(stream).num_rows, info.size)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{info.path} is no intact Parquet file: {error}") from error


def _schema(part: Part, file: File, endpoint: str | None) -> pa.Schema:
    if part.source in BUILT_IN:
        return _built_in(part.source).schema
    filesystem, _ = open_filesystem(part.source, endpoint, names=KEYS)
    with filesystem.open_input_file(file.path) as stream:
        return pq.read_schema(stream)


def _blocks(
    part: Part, columns: Sequence[str], endpoint: str | None
) -> Iterator[tuple[int, pa.Table]]:
    """All rows of the part's files, block by block, each after the number of its first row."""
    first = 0
    for file in part.files:
        for block in _blocks_of(part, file, columns, endpoint):
            yield first, block
            first += block.num_rows


def _blocks_of(
    part: Part, file: File, columns: Sequence[str], endpoint: str | None
) -> Iterator[pa.Table]:
    if part.source in BUILT_IN:
        yield _built_in(part.source).select(columns)
        return
    filesystem, _ = open_filesystem(part.source, endpoint, names=KEYS)
    with filesystem.open_input_file(file.path) as stream:
        try:
            for batch in pq.ParquetFile(stream).iter_batches(BLOCK_ROWS, columns=list(columns)):
                yield pa.Table.from_batches([batch]).select(columns)
        except pa.ArrowInvalid as error:
            raise RunError(f"{file.path} is no intact Parquet file: {error}") from error


def _built_in(name: str) -> pa.Table:
    """569 tumours, each by 30 measures: malignant or benign."""
    # Only whoever reads them needs scikit-learn.
    from sklearn.datasets import load_breast_cancer

    assert name == "breast_cancer"
    found = load_breast_cancer()
    columns = {
        str(column).replace(" ", "_"): found.data[:, index]
        for index, column in enumerate(found.feature_names)
    }
    return pa.table(columns | {"diagnosis": found.target_names[found.target].astype(object)})


# Columns.


def _columns(parts: Iterable[Part], data: Table, endpoint: str | None) -> tuple[str, ...]:
    """What is learnt from. Raises ConfigError if a file lacks a column, or has one that is no number."""
    chosen: tuple[str, ...] | None = data.feature_columns
    label: pa.DataType | None = None
    for part in parts:
        for file in part.files:
            schema = _schema(part, file, endpoint)
            if chosen is None:
                chosen = tuple(name for name in schema.names if name != data.label_column)
            check_columns(file.path, schema.names, data.label_column, *chosen, remedy=COLUMNS)
            kind = schema.field(data.label_column).type
            if label is not None and kind != label:
                raise ConfigError(
                    f"column {data.label_column} is of type {kind} in {file.path} and of type {label} in "
                    "another file. Use files of one type."
                )
            label = kind
            wrong = [name for name in chosen if not _is_number(schema.field(name).type)]
            if wrong:
                kinds = ", ".join(f"{name} ({schema.field(name).type})" for name in wrong[:SHOWN])
                more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
                raise ConfigError(
                    f"{file.path} has columns that are no numbers: {kinds}{more}.\n"
                    "       Make numbers of them, or name those to learn from in data.feature_columns."
                )
    assert chosen is not None  # a source has files
    if not chosen:
        raise ConfigError(f"{data.source} has no column but the label's.")
    return chosen


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """(N,) float32; NaN for what is not there."""
    numbers: np.ndarray = column.cast(pa.float32(), safe=False).to_numpy()
    return numbers


# Labels.


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    return column.cast(pa.int8()) if pa.types.is_boolean(kind) else column


def _labels(column: pa.ChunkedArray, classes: Sequence[Label]) -> np.ndarray:
    """(N,) float32, with NaN for a label that is missing or no class."""
    column = _plain(column)
    if classes:
        column = pc.index_in(column, value_set=pa.array(classes, column.type))
    return _numbers(column)


def _classes(part: Part, label: str, objective: str, endpoint: str | None) -> tuple[Label, ...]:
    """The labels that there are in training, in order. Raises ConfigError if they are too many or too few."""
    found: set[Label] = set()
    for first, block in _blocks(part, [label], endpoint):
        column = _plain(block.filter(pa.array(part.mask(first, block.num_rows)))[label])
        found |= set(pc.drop_null(pc.unique(column)).to_pylist())
        if len(found) > MOST_CLASSES:
            raise ConfigError(
                f"column {label} of {part.source} has more than {MOST_CLASSES} different labels: these are "
                "no classes. Use train.objective: regression, or another data.label_column."
            )
    if objective == "binary" and len(found) != 2:
        raise ConfigError(
            f"train.objective = binary, and column {label} of {part.source} has {len(found)} different "
            f"labels: {_some(found)}.\n       Use multiclass, regression, or another data.label_column."
        )
    if len(found) < 2:
        raise ConfigError(
            f"column {label} of {part.source} has one label alone, {_some(found)}: there is nothing to learn."
        )
    return tuple(sorted(found))


def _some(labels: set[Label]) -> str:
    shown = ", ".join(sorted(map(str, labels))[:SHOWN])
    return shown if len(labels) <= SHOWN else f"{shown} and {len(labels) - SHOWN} more"


def _counted(part: Part, label: str, classes: Sequence[Label], endpoint: str | None) -> Part:
    """The same with the number of its rows. Raises ConfigError for a row whose label cannot be learnt."""
    rows = 0
    for first, block in _blocks(part, [label], endpoint):
        mask = part.mask(first, block.num_rows)
        column = block[label]
        if not classes and not _is_number(_plain(column).type):
            raise ConfigError(
                f"column {label} of {part.source} is of type {column.type}, and train.objective = regression "
                "learns numbers. Use binary or multiclass, or another data.label_column."
            )
        bad = np.flatnonzero(mask & ~np.isfinite(_labels(column, classes)))
        if len(bad):
            value = column[int(bad[0])].as_py()
            told = "has no label" if value is None else f"has the label {value}"
            right = f"one of {_some(set(classes))}" if classes else "a number"
            raise ConfigError(
                f"{part.source}: row {first + int(bad[0])} (from 0, over all files) {told}, which should be "
                f"{right}."
            )
        rows += int(mask.sum())
    return replace(part, rows=rows)
