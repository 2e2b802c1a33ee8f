"""The parts of a source, for training and for validation, and where a sample of a part comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

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
    """Which of the names found stand for `train` and `valid`: `{"train": "training", "valid": "test"}`."""
    found = {name.lower(): name for name in names}
    chosen = {}
    for split, known in SPLIT_NAMES.items():
        match = next((found[name] for name in known if name in found), None)
        if match is not None:
            chosen[split] = match
    others = sorted(set(found.values()) - set(chosen.values()))
    if others:
        say(f"{path}: {', '.join(others)} is left out; validation is on {chosen[VALID]}")
    return chosen


def is_split_name(name: str) -> bool:
    return any(name.lower() in known for known in SPLIT_NAMES.values())


def stamp_of(*parts: object) -> str:
    """A fingerprint of what a source is made of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
