"""Turn the labels of a source into numbers from 0, find the names of the classes, and find wrong labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainyard_trainer.data.sources.images.samples import Samples
from trainyard_trainer.data.sources.parts import TRAIN
from trainyard_trainer.errors import ConfigError

MOST_CLASSES = 2**20
"""The largest number of classes. A larger label is most likely from another column."""

SHOWN = 5
"""The largest number of classes that an error message lists."""


class Numbered(NamedTuple):
    """The numbered labels of one split of a source."""

    labels: np.ndarray
    """(N,) int64; the value of a row with a problem has no meaning."""
    problems: dict[int, str]
    """Why a row cannot be used, by row."""

    @property
    def good_rows(self) -> np.ndarray:
        is_good = np.ones(len(self.labels), bool)
        is_good[list(self.problems)] = False
        return np.flatnonzero(is_good)


def number_labels(
    splits: Mapping[str, Samples], class_names: tuple[str, ...] | None, num_classes: int | None
) -> tuple[tuple[str, ...], dict[str, Numbered]]:
    """Return the names of the classes, and the numbered labels of each split.

    The classes are the sorted names of the training samples, or the numbers from 0 to the highest label.
    Raises ConfigError if their number is not `num_classes`.
    """
    are_names = {name: _are_names(samples.labels) for name, samples in splits.items()}
    if len(set(are_names.values())) > 1:
        words = ", ".join(
            f"{'names' if are else 'numbers'} in {name}" for name, are in are_names.items()
        )
        raise ConfigError(f"labels are {words}. Use names in both splits, or numbers in both.")
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
    """Return the number of classes of integer labels: one more than the highest label."""
    highest = 0
    for samples in splits:
        labels = samples.labels
        plausible = labels.filter(pc.less(labels, MOST_CLASSES))
        highest = max(highest, pc.max(plausible).as_py() or 0)
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
        return f"its label '{label}' is not a class of the training samples: {_shortened(classes)}"
    return f"its label {label} is out of range: the classes are 0 to {len(classes) - 1}"


def _shortened(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:SHOWN])
    return shown if len(classes) <= SHOWN else f"{shown} and {len(classes) - SHOWN} more"
