"""How right a model is on each class, and what it takes for what: arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Confusion = Sequence[Sequence[int]]
"""(label, predicted, how many), where there are any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassResult:
    """How the validation images of one class came out."""

    label: int
    images: int
    right: int
    mistaken_for: int | None
    """The class that its images are most often taken for, if any is."""

    @property
    def accuracy(self) -> float:
        return self.right / self.images


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A class that is taken for another one."""

    label: int
    predicted: int
    count: int
    share: float
    """Of all images of the class."""


def per_class(confusion: Confusion) -> list[ClassResult]:
    """The least accurate class first; classes without images are left out."""
    rows: dict[int, dict[int, int]] = {}
    for label, predicted, count in confusion:
        rows.setdefault(label, {})[predicted] = count
    results = [_result(label, row) for label, row in rows.items()]
    return sorted(results, key=lambda result: (result.accuracy, -result.images, result.label))


def _result(label: int, row: dict[int, int]) -> ClassResult:
    wrong = {predicted: count for predicted, count in row.items() if predicted != label}
    return ClassResult(
        label=label,
        images=sum(row.values()),
        right=row.get(label, 0),
        mistaken_for=max(wrong, key=lambda predicted: wrong[predicted]) if wrong else None,
    )


def most_confused(confusion: Confusion) -> list[Pair]:
    """All pairs, those with most images first."""
    images = {result.label: result.images for result in per_class(confusion)}
    pairs = [
        Pair(label=label, predicted=predicted, count=count, share=count / images[label])
        for label, predicted, count in confusion
        if label != predicted
    ]
    return sorted(pairs, key=lambda pair: (-pair.count, -pair.share, pair.label))
