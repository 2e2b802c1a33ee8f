"""What a recipe computes from a batch: sums, which the engine adds over batches, passes and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Sums = Tensor | Sequence[Tensor | float]
"""The sums of a metric: a tensor of the metric's shape, or one number or scalar tensor for each entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of a batch, as a sum and its weight, and the sums of the recipe's metrics.

    The gradients of a step are those of sum / weight over the global batch, whatever part of it each worker
    and each pass has.
    """

    sum: Tensor
    """The sum of the losses of all samples (or tokens, or pixels) of the batch, a float scalar; no mean."""
    weight: Tensor | int
    """The number of samples (or tokens, or pixels) in the sum.

    An int is the same multiple of the number of samples for every batch: the engine then knows the weight of
    the global batch. If it depends on the content of the samples, it is a scalar tensor on the device.
    """
    metrics: Mapping[str, Sums] = field(default_factory=dict)
    """The sums of each of `Recipe.metrics`, by its name."""


class Top(NamedTuple):
    """Rows of a validation, of which those with the largest first column are kept.

    Of rows with equal first columns, those with the smallest second column are kept.
    """

    rows: Tensor
    """(N, columns) float64, which holds ids exactly."""
    limit: int
    """The number of rows to keep."""

    def merge(self, rows: Tensor) -> Top:
        """Return the top rows of these and of further rows."""
        both = torch.cat([self.rows, rows])
        by_second = both[both[:, 1].argsort()]
        largest = by_second[:, 0].argsort(descending=True, stable=True)[: self.limit]
        return Top(by_second[largest], self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation(Loss):
    """The loss of a validation batch, and what else the recipe wants to know of the validation."""

    details: Mapping[str, Tensor | Top] = field(default_factory=dict)
    """By name: a tensor is summed over all batches and workers, of `Top` the top rows of all are kept."""
