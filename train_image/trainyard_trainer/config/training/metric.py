"""The description of a metric: its name, which values are better, and how it is computed from sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["higher", "lower"]

RATIO = "0 to 1"
"""The unit of metrics that are shares."""

LOSS = "loss"
"""The name of the loss, which every recipe has."""

VALIDATION_PREFIX = "val_"
"""`val_<name>` is the metric `<name>` on the validation samples."""


def ratio(sums: Any) -> float:
    """Divide the first of two sums, a tensor, by the second; NaN if the second is 0."""
    amount, weight = sums.tolist()
    return amount / weight if weight else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric of a recipe, which is computed from sums over samples.

    The engine adds the sums of all batches, passes and workers, so the metric does not depend on how the
    samples were divided.
    """

    name: str
    """The name in metrics.jsonl and in run files, such as `accuracy`; `val_accuracy` is the validation's."""
    direction: Direction
    """Which values are better."""
    description: str
    """A few words for the documentation, such as `share of right predictions`."""
    title: str = ""
    """The title of its chart; the default follows from the name."""
    unit: str = ""
    """The unit of the value."""
    shape: tuple[int, ...] = (2,)
    """The shape of the sums."""
    is_validation_only: bool = False
    """Whether it comes from `Recipe.measure` at each validation, and neither `loss` nor `evaluate` has it."""
    compute: Callable[[Any], float] = ratio
    """Computes the value from the sums, a float64 tensor of this shape in host memory."""


ACCURACY = Metric(
    name="accuracy",
    direction="higher",
    description="share of the targets that were predicted correctly",
    unit=RATIO,
)
"""Computed from the number of correct predictions and the number of targets."""

ANSWERS = Metric(
    name="accuracy",
    direction="higher",
    description="share of the questions that were answered correctly",
    unit=RATIO,
    is_validation_only=True,
)
"""Computed from the number of correct answers and the number of questions."""

RMSE = Metric(
    name="rmse",
    direction="lower",
    description="root mean squared error",
    title="RMSE",
    unit="unit of the label",
    compute=lambda sums: math.sqrt(ratio(sums)),
)
"""Computed from the sum of squared errors and the number of labels."""


@dataclass(frozen=True, slots=True)
class ValidationGoal:
    """A validation metric by which checkpoints are compared."""

    name: str
    """The name in metrics.jsonl, such as `val_loss`."""
    direction: Direction

    def worth(self, value: float | None) -> float:
        """Return a number that is higher for better values; minus infinity if there is no finite value."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.direction == "higher" else -value


def goals_of(metrics: Sequence[Metric]) -> dict[str, ValidationGoal]:
    """Return what checkpoints of a recipe with these metrics can be compared by, its first metric first."""
    directions: dict[str, Direction] = {metric.name: metric.direction for metric in metrics}
    directions[LOSS] = "lower"
    names = {f"{VALIDATION_PREFIX}{name}": each for name, each in directions.items()}
    return {name: ValidationGoal(name, direction) for name, direction in names.items()}


def is_validation(name: str) -> bool:
    """Whether a metric of metrics.jsonl was computed on the validation samples."""
    return name.startswith(VALIDATION_PREFIX)
