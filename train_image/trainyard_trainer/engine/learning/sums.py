"""Sums of loss and metrics over batches, passes and workers, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard_trainer.config.training.metric import Metric
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.loss import Evaluation, Loss, Sums, Top
from trainyard_trainer.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The result of one validation over all validation samples."""

    num_samples: int
    loss: float
    metrics: dict[str, float]
    """The recipe's metrics by name."""
    details: dict[str, Any]
    """What else the recipe tells, as JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a checkpoint's validation.json."""
        known = {"num_samples": self.num_samples, "loss": self.loss}
        return {**known, **self.metrics, **self.details}


class LossSums:
    """Sums of loss, weight and metrics, kept on the device.

    Reading them makes the host wait for the device, so it is done about once a second.
    """

    def __init__(self, metrics: Sequence[Metric], device: torch.device) -> None:
        self._metrics = metrics
        sizes = [math.prod(metric.shape) for metric in metrics]
        self.sums = torch.zeros(2 + sum(sizes), dtype=torch.float64, device=device)
        """Loss, weight, and the sums of each metric; float64 counts without rounding."""
        self._loss, self._weight = self.sums[0], self.sums[1]
        self._of_metrics = self._split(self.sums)
        # Views of single entries: adding to `sums[index]` would copy the entry once more.
        self._entries = {name: list(part) for name, part in self._of_metrics.items() if part.dim()}
        self._before = (0.0, 0.0)

    def _split(self, sums: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(metric.shape) for metric in self._metrics]
        parts = sums[2:].split(sizes)
        pairs = zip(self._metrics, parts, strict=True)
        return {metric.name: part.view(metric.shape) for metric, part in pairs}

    def update(self, found: Loss) -> None:
        """Add the sums of a batch. Raises ConfigError if those of a metric are missing."""
        for name in self._of_metrics:
            if name not in found.metrics:
                raise ConfigError(
                    f"the recipe declares the metric {name}, and its loss has no sums of it. Return "
                    f"them in Loss.metrics, or remove {name} from Recipe.metrics."
                )
        self.update_part(found, has_loss=True)

    @torch.no_grad()
    def update_part(self, found: Loss, *, has_loss: bool) -> None:
        """Add the metrics that one network's loss of a batch has; `has_loss` adds the loss itself, too."""
        if has_loss:
            self._loss += found.sum.detach()
            self._weight += found.weight
        for name, sums in self._of_metrics.items():
            if name in found.metrics:
                self._add(name, sums, found.metrics[name])

    def _add(self, name: str, sums: Tensor, found: Sums) -> None:
        shape = found.shape if isinstance(found, Tensor) else (len(found),)
        if tuple(shape) != tuple(sums.shape):
            raise ConfigError(
                f"the sums of the metric {name} have the shape {tuple(shape)}, and the recipe declares "
                f"{tuple(sums.shape)}: correct Metric.shape, or what Loss.metrics has."
            )
        if isinstance(found, Tensor):
            sums += found.detach()
            return
        for entry, value in zip(self._entries[name], found, strict=True):
            entry += value

    def restore(self, sums: Tensor) -> None:
        """Add the sums of an epoch that a checkpoint has interrupted."""
        self.sums += sums.to(self.sums.device)
        loss, weight = sums[:2].tolist()
        self._before = (loss, weight)

    def since_last(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss since the last call, and the metrics since the epoch began."""
        sums = self.sums.to("cpu", copy=True)
        loss, weight = sums[:2].tolist()
        loss_before, weight_before = self._before
        self._before = (loss, weight)
        return mean(loss - loss_before, weight - weight_before), self.compute(sums)[1]

    def over_workers(self, worker: Worker) -> Tensor:
        """Return the sums over all workers, without changing this worker's sums. All workers must call it."""
        return worker.sum(self.sums.clone())

    def compute(self, sums: Tensor) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics of sums, such as `over_workers` returns."""
        sums = sums.cpu()
        loss, weight = sums[:2].tolist()
        parts = self._split(sums)
        values = {metric.name: metric.compute(parts[metric.name]) for metric in self._metrics}
        return mean(loss, weight), values


def mean(total: float, weight: float) -> float:
    """Divide a sum by its weight; 0 if nothing was added."""
    return total / weight if weight else total


def merged(before: Tensor | Top | None, new: Tensor | Top) -> Tensor | Top:
    """Add a detail of a validation batch to what the batches before it had."""
    if isinstance(new, Top):
        start = before if isinstance(before, Top) else Top(new.rows[:0], new.limit)
        return start.merge(new.rows)
    return before + new if isinstance(before, Tensor) else new


def nothing_of(detail: Tensor | Top) -> Tensor | Top:
    """Return a detail without any samples: zeros, or no rows."""
    if isinstance(detail, Top):
        return Top(detail.rows[:0], detail.limit)
    return torch.zeros_like(detail)


def of_batches(metrics: Sequence[Metric]) -> list[Metric]:
    """Return the metrics whose sums each batch has."""
    return [metric for metric in metrics if not metric.is_validation_only]


class EvaluationSums:
    """The sums, and the details, of one worker's share of the validation samples."""

    def __init__(self, recipe: Recipe[Any], worker: Worker) -> None:
        self._recipe = recipe
        self._worker = worker
        self._sums = LossSums(of_batches(recipe.metrics), worker.device)
        measured = [metric for metric in recipe.metrics if metric.is_validation_only]
        self._measured = LossSums(measured, worker.device)
        self._details: dict[str, Tensor | Top] = {}
        self._num_samples = 0
        self.is_empty = True
        """Whether nothing was added yet, so that the names of the details are not known."""

    def update(self, found: Evaluation, num_samples: int) -> None:
        """Add what the recipe has found in a batch; with 0 samples only the names of its details."""
        self.is_empty = False
        self._num_samples += num_samples
        if num_samples:
            self._sums.update(found)
        for name, detail in found.details.items():
            self._details[name] = merged(
                self._details.get(name), detail if num_samples else nothing_of(detail)
            )

    def measure(self, found: Mapping[str, Sums]) -> None:
        """Add this worker's sums of the metrics that no batch has."""
        self._measured.update(Loss(sum=torch.zeros(()), weight=0, metrics=found))

    def compute(self) -> Validation:
        """Return the result over all workers. All workers must call it."""
        worker = self._worker
        loss, metrics = self._sums.compute(self._sums.over_workers(worker))
        metrics |= self._measured.compute(self._measured.over_workers(worker))[1]
        count = worker.sum(torch.tensor(self._num_samples, device=worker.device))
        details: dict[str, Tensor | Top] = {}
        for name, detail in self._details.items():
            if isinstance(detail, Top):
                parts = worker.gathered(detail.rows.cpu())
                details[name] = Top(parts[0][:0], detail.limit).merge(torch.cat(parts))
            else:
                details[name] = worker.sum(detail.clone()).cpu()
        return Validation(
            num_samples=int(count),
            loss=loss,
            metrics=metrics,
            details=self._recipe.summarize(details),
        )
