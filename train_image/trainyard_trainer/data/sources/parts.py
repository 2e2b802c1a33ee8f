"""The parts of a source, for training and for validation, and where a sample of a part comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trainyard_trainer.errors import ConfigError

TRAIN = "train"
VALID = "valid"
ALL = "all"
"""Name of the only part of a source that is not split."""

SPLIT_COLUMN = "split"
"""The column of a manifest, or in the names of folders, that holds the split of each sample."""

SPLIT_NAMES = {
    TRAIN: ("train", "training"),
    VALID: ("valid", "val", "validation", "dev", "test", "t10k"),
}
"""What people call the parts; of several names of one part the first counts."""


class SampleLocation(NamedTuple):
    """Where a sample comes from, so that a person finds it."""

    file: str
    row: int | None = None
    unit: str = "row"

    def __str__(self) -> str:
        return self.file if self.row is None else f"{self.file}, {self.unit} {self.row}"


def choose_splits(names: Iterable[str], path: str, say: Callable[[str], None]) -> dict[str, str]:
    """Return the names that stand for `train` and `valid`: `{"train": "training", "valid": "test"}`.

    Of several names for validation the first in SPLIT_NAMES counts, and `say` announces the others.
    Raises ConfigError for two names of the training data, and for names that differ in case only.
    """
    found = sorted(names)
    chosen: dict[str, str] = {}
    for split, known in SPLIT_NAMES.items():
        fitting = sorted(
            (name for name in found if name.lower() in known),
            key=lambda name: known.index(name.lower()),
        )
        alike = [name for name in fitting if split == TRAIN or name.lower() == fitting[0].lower()]
        if len(alike) > 1:
            raise ConfigError(
                f"{path} has the splits {' and '.join(alike)}, and which of them is for "
                f"{'training' if split == TRAIN else 'validation'} cannot be known. Give both one name, or "
                "remove one."
            )
        if fitting:
            chosen[split] = fitting[0]
    others = sorted(set(found) - set(chosen.values()))
    if others:
        say(f"{path}: {', '.join(others)} is left out; validation is on {chosen[VALID]}")
    return chosen


def is_split_name(name: str) -> bool:
    return any(name.lower() in known for known in SPLIT_NAMES.values())


def stamp_of(*parts: object) -> str:
    """A fingerprint of what a source is made of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
