"""The table of a run with `train.recipe: gradient_boosting`: its columns, its classes and the workers' rows.

Of each part, worker r of W gets every W-th row, starting at row r. A worker therefore gets the same rows in
the same order each time, and a table that is sorted by its labels is distributed evenly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from trainyard_trainer.boosting.table_columns import Say, choose_columns, shortened
from trainyard_trainer.boosting.table_files import (
    File,
    Part,
    RowBlock,
    built_in_table,
    read_blocks,
)
from trainyard_trainer.config.data.section import Table
from trainyard_trainer.config.data.sources import BUILT_IN
from trainyard_trainer.config.training.boosting import Boosting
from trainyard_trainer.data.sources.column_types import (
    MISSING,
    Use,
    first_unusable,
    refuse_lookalikes,
    to_floats,
    to_labels,
)
from trainyard_trainer.data.sources.images.tables import split_files
from trainyard_trainer.data.sources.lance_datasets import SUFFIX, lance_folders, split_version
from trainyard_trainer.data.sources.listing import SOURCE_KEYS, find_root, list_all
from trainyard_trainer.data.sources.parquet_files import is_parquet, opened, parquet_files
from trainyard_trainer.data.sources.partitions import columns_in_folders
from trainyard_trainer.data.sources.parts import ALL, SPLIT_COLUMN, TRAIN, VALID, stamp_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.storage import open_filesystem

MOST_CLASSES = 1000
"""The largest number of classes. Labels with more values are most likely numbers for `regression`."""

SEPARATORS = re.compile(r'[\s"\',:\[\]{}<>]+')
"""A pattern of characters that XGBoost or LightGBM does not accept in the name of a column."""

Label = int | float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a part that a worker holds."""

    features: np.ndarray
    """(N, columns) float32; NaN for missing values."""
    labels: np.ndarray
    """(N,) float32: the indices of classes, or numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTable:
    """A checked table for training. It is pickled and sent over the network."""

    source: str
    endpoint: str | None
    label: str
    classes: tuple[Label, ...]
    """The classes in sorted order; empty for a regression."""
    columns: tuple[str, ...]
    """The feature columns."""
    train: Part
    valid: Part

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the feature columns in the model."""
        return tuple(SEPARATORS.sub("_", column) for column in self.columns)

    @property
    def stamp(self) -> str:
        """A fingerprint of the files."""
        return stamp_of(
            [(file.path, file.rows, file.size) for file in (*self.train.files, *self.valid.files)]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the description of the model's input that checkpoints and model.json contain."""
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
    """Read the columns, the classes and the number of rows of a table.

    Raises ConfigError for data that cannot be used for training.
    """
    endpoint = data.endpoint or endpoint
    found = _find(data.source, endpoint, say)
    share: float | None = None
    if data.valid_source is not None:
        others = _find(data.valid_source, endpoint, say)
        files, valid_files = (
            tuple(file for chosen in splits.values() for file in chosen)
            for splits in (found, others)
        )
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
    use = Use.NUMBER if train.objective == "regression" else Use.CLASS
    columns = choose_columns(parts.values(), data, use, endpoint, say)
    classes: tuple[Label, ...] = ()
    if use == Use.CLASS:
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
            f"{data.source} has columns whose names differ only in spaces, quotes or brackets, which become "
            f"one name in the model: {twice[0]}. Rename one, or select columns in data.feature_columns."
        )
    return table


def check_shares(table: PreparedTable, workers: int) -> None:
    """Raise ConfigError if a part has fewer rows than workers. A worker without rows blocks the others."""
    for name, part in (("training", table.train), ("validation", table.valid)):
        if part.rows < workers:
            raise ConfigError(
                f"{part.source} has {part.rows} {name} rows, but each of {workers} workers needs one. "
                "Use fewer workers, another data.valid_share, or more rows."
            )


def read_share(table: PreparedTable, part: Part, rank: int, workers: int) -> Rows:
    """Read a worker's share of a part: every `workers`-th row, starting at row `rank`."""
    features, labels = [], []
    passed = 0  # rows of the part before this block
    for block in read_blocks(part, [*table.columns, table.label], table.endpoint):
        mask = part.mask(block.first, block.table.num_rows)
        numbers = passed + np.cumsum(mask) - 1
        passed += int(mask.sum())
        mine = block.table.filter(pa.array(mask & (numbers % workers == rank)))
        features.append(np.stack([to_floats(mine[column]) for column in table.columns], axis=1))
        labels.append(_labels(block, mine[table.label], table.classes))
    return Rows(features=np.concatenate(features), labels=np.concatenate(labels))


def _find(source: str, endpoint: str | None, say: Say) -> dict[str, tuple[File, ...]]:
    """Return the non-empty files of a source by split: `all`, or `train` and `valid`. Raises ConfigError."""
    if source in BUILT_IN:
        table = built_in_table(source)
        return {ALL: (File(source, table.num_rows, table.nbytes),)}
    require_no_lance(source)
    filesystem, root = open_filesystem(source, endpoint, names=SOURCE_KEYS)
    info = find_root(source, filesystem, root, endpoint)
    if info.type == fs.FileType.File:
        infos, folder = [info] if is_parquet(info.base_name) else [], root.rpartition("/")[0]
    else:
        listed = list_all(filesystem, root, say)
        for dataset in lance_folders(root, listed):
            require_no_lance(dataset)
        infos, folder = parquet_files(filesystem, root, listed), root
    if not infos:
        raise ConfigError(
            f"{source} has no Parquet files (*.parquet), the only format that train.recipe = "
            "gradient_boosting reads. To convert a CSV file: "
            "pandas.read_csv('a.csv').to_parquet('a.parquet', index=False)."
        )
    partitions = columns_in_folders(folder, [each.path for each in infos])
    files = []
    for each, in_folders in zip(infos, partitions, strict=True):
        with opened(filesystem, each.path) as parquet:
            rows = parquet.metadata.num_rows
        files.append(File(each.path, rows, each.size, tuple(in_folders.items())))
    splits = split_files(source, folder, files, say)
    if ALL not in splits:
        # The name of a split is not a feature column.
        splits = {
            name: [_without_split(file) for file in chosen] for name, chosen in splits.items()
        }
        if not {TRAIN, VALID} <= splits.keys():
            splits = {ALL: [file for chosen in splits.values() for file in chosen]}
    found = {name: tuple(file for file in chosen if file.rows) for name, chosen in splits.items()}
    empty = next((name for name, chosen in found.items() if not chosen), None)
    if empty is not None:
        raise ConfigError(
            f"{source} has no rows{'' if empty == ALL else f' in its {empty} split'}: its files are empty."
        )
    return found


def require_no_lance(source: str) -> None:
    """Raise ConfigError for a data set of Lance, which is known by the ending of its name."""
    if split_version(source)[0].endswith(SUFFIX):
        raise ConfigError(
            f"{source} is a data set of Lance, and train.recipe = gradient_boosting reads Parquet alone. "
            "Write it as Parquet:\n"
            '       pyarrow.dataset.write_dataset(lance.dataset("...").scanner().to_reader(), "folder", '
            'format="parquet")'
        )


def _without_split(file: File) -> File:
    kept = tuple((name, value) for name, value in file.in_folders if name != SPLIT_COLUMN)
    return replace(file, in_folders=kept)


def _labels(block: RowBlock, column: pa.ChunkedArray, classes: Sequence[Label]) -> np.ndarray:
    """Return the labels, (N,) float32, with NaN for missing labels, unknown classes and unusable numbers."""
    if not classes:
        return to_floats(column)
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan, np.float32)
    labels = to_labels(column, block.file.path, "")
    known = pa.array(classes)
    if pa.types.is_floating(labels.type) or pa.types.is_floating(known.type):
        labels, known = labels.cast(pa.float64()), known.cast(pa.float64())
    return to_floats(pc.index_in(labels, value_set=known.cast(labels.type)))


def _classes(part: Part, label: str, objective: str, endpoint: str | None) -> tuple[Label, ...]:
    """Return the distinct labels of the training rows in sorted order.

    Raises ConfigError if there are too many or too few, or if two look alike.
    """
    found: set[Label] = set()
    for block in read_blocks(part, [label], endpoint):
        mask = part.mask(block.first, block.table.num_rows)
        column = block.table.filter(pa.array(mask))[label]
        if pa.types.is_null(column.type):
            continue
        labels = to_labels(column, block.file.path, label)
        found |= set(pc.drop_null(pc.unique(labels)).to_pylist())
        if len(found) > MOST_CLASSES:
            raise ConfigError(
                f"column {label} of {part.source} has more than {MOST_CLASSES} different labels, the limit "
                "for classification. Use train.objective: regression, or another data.label_column."
            )
    if not found:
        raise ConfigError(f"column {label} of {part.source} has no labels: all values are missing.")
    if objective == "binary" and len(found) != 2:
        raise ConfigError(
            f"train.objective = binary, but column {label} of {part.source} has {len(found)} different "
            f"labels: {shortened(list(found))}.\n       Use multiclass, regression, or another "
            "data.label_column."
        )
    if len(found) < 2:
        raise ConfigError(
            f"column {label} of {part.source} has only one distinct label, {shortened(list(found))}; "
            "at least two are needed."
        )
    # 1 and 1.0 are the same class: some files may store integers and others floats.
    if any(isinstance(each, float) for each in found):
        return tuple(sorted(map(float, found)))
    refuse_lookalikes(sorted(each for each in found if isinstance(each, str)))
    return tuple(sorted(found))


def _counted(part: Part, label: str, classes: Sequence[Label], endpoint: str | None) -> Part:
    """Return the part with the number of its rows. Raises ConfigError for a label that cannot be used."""
    rows = 0
    for block in read_blocks(part, [label], endpoint):
        mask = part.mask(block.first, block.table.num_rows)
        column = block.table[label]
        bad = np.flatnonzero(mask & ~np.isfinite(_labels(block, column, classes)))
        if len(bad):
            row = int(bad[0])
            raise ConfigError(
                f"{block.where(row)} {_explain_label(column[row].as_py(), classes)}. Remove such rows, or "
                "set their labels."
            )
        if not classes:
            large = first_unusable(column.filter(pa.array(mask)))
            if large is not None:
                row = int(np.flatnonzero(mask)[large])
                raise ConfigError(
                    f"{block.where(row)} has the label {column[row].as_py()}, which is too large for a "
                    "32-bit float. Scale the labels, or use another data.label_column."
                )
        rows += int(mask.sum())
    return replace(part, rows=rows)


def _explain_label(value: object, classes: Sequence[Label]) -> str:
    expected = f"one of {shortened(classes)}" if classes else "a finite number"
    if value is None:
        return f"has no label, which should be {expected}"
    if value in MISSING:
        return f"has the label {value!r}, which stands for a missing value and should be {expected}"
    return f"has the label {value!r}, which should be {expected}"
