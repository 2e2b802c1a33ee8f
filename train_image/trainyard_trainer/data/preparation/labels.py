"""Labels as numbers from 0, the names of the classes, and what is wrong with the labels of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainyard_trainer.data.sources.samples import TRAIN, Samples
from trainyard_trainer.errors import ConfigError

MOST_CLASSES = 2**20
"""A larger number is no class, but something else in the wrong column."""

SHOWN = 5


class Numbered(NamedTuple):
    """Labels of one part of a data set."""

    labels: np.ndarray
    """(N,) int64; anything where there is a problem."""
    problems: dict[int, str]
    """Why a row is no sample, by row."""

    @property
    def good_rows(self) -> np.ndarray:
        is_good = np.ones(len(self.labels), bool)
        is_good[list(self.problems)] = False
        return np.flatnonzero(is_good)


def number_labels(
    splits: Mapping[str, Samples], class_names: tuple[str, ...] | None, num_classes: int | None
) -> tuple[tuple[str, ...], dict[str, Numbered]]:
    """The classes, and the labels of each part.

    Names are those of the training samples, sorted; numbers are their own names, up to the highest.
    Raises ConfigError if that is another number of classes than it should be.
    """
    are_names = {name: _are_names(samples.labels) for name, samples in splits.items()}
    if len(set(are_names.values())) > 1:
        words = ", ".join(
            f"{'names' if are else 'numbers'} in {name}" for name, are in are_names.items()
        )
        raise ConfigError(f"labels are {words}. Use the same in both.")
    if are_names[TRAIN]:
        classes = class_names or _names_in(splits[TRAIN].labels)
    else:
        classes = class_names or tuple(
            map(str, range(num_classes or _count_numbers(splits.values())))
        )
    if num_classes is not None and len(classes) != num_classes:
        raise ConfigError(
            f"train.model.num_classes = {num_classes}, but the data has {len(classes)} classes: "
            f"{_shortened(classes)}. Use {len(classes)}."
        )
    return classes, {name: _number(samples, classes) for name, samples in splits.items()}


def _are_names(labels: pa.Array) -> bool:
    return not pa.types.is_integer(labels.type)


def _names_in(labels: pa.Array) -> tuple[str, ...]:
    return tuple(sorted(pc.drop_null(pc.unique(labels)).to_pylist()))


def _count_numbers(splits: Iterable[Samples]) -> int:
    """One more than the highest label that can be a class."""
    highest = 0
    for samples in splits:
        labels = samples.labels
        known = labels.filter(pc.less(labels, MOST_CLASSES))
        highest = max(highest, pc.max(known).as_py() or 0)
    return highest + 1


def _number(samples: Samples, classes: tuple[str, ...]) -> Numbered:
    problems = dict(samples.problems)
    labels = samples.labels
    missing = np.flatnonzero(pc.is_null(labels).to_numpy(zero_copy_only=False))
    if _are_names(labels):
        numbers = pc.index_in(labels, pa.array(classes, labels.type))
    else:
        in_range = pc.and_(pc.greater_equal(labels, 0), pc.less(labels, len(classes)))
        numbers = pc.if_else(in_range, labels, None)
    unknown = np.flatnonzero(pc.is_null(numbers).to_numpy(zero_copy_only=False))
    for row in np.setdiff1d(unknown, missing).tolist():
        problems.setdefault(row, _explain(labels[row].as_py(), classes))
    for row in missing.tolist():
        problems.setdefault(row, "it has no label")
    return Numbered(pc.fill_null(numbers, 0).to_numpy().astype(np.int64), problems)


def _explain(label: int | str, classes: tuple[str, ...]) -> str:
    if isinstance(label, str):
        return f"its label '{label}' is no class of the training samples: {_shortened(classes)}"
    return f"its label {label} is out of range: 0 to {len(classes) - 1} are right"


def _shortened(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:SHOWN])
    return shown if len(classes) <= SHOWN else f"{shown} and {len(classes) - SHOWN} more"
