"""Training and validation metrics: sums that stay on the device, and the worst mistakes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.parallel.strategy import Worker

NUM_WORST = 18
"""The number of worst mistakes that a validation keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A validation image that the model classified wrongly."""

    id: int
    label: int
    predicted: int
    confidence: float
    """The probability of the predicted class, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The metrics of one validation over all validation samples."""

    num_samples: int
    loss: float
    accuracy: float
    confusion: tuple[tuple[int, int, int], ...]
    """The non-zero entries of the confusion matrix: (label, predicted class, count)."""
    worst: tuple[Mistake, ...]
    """The mistakes with the highest confidence, the highest first."""

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a checkpoint's validation.json."""
        return asdict(self)


class BatchLoss(NamedTuple):
    """The loss of a model's outputs for one batch, and how many of its targets were predicted correctly."""

    loss: torch.Tensor
    """The mean over the batch's targets, a scalar."""
    num_correct: torch.Tensor
    """The number of correct predictions, a scalar."""
    num_targets: int
    """The number of targets: images, or bytes of text."""


class LossSums:
    """Sums of loss and correct predictions, kept on the device.

    Reading them makes the host wait for the device, so it is done about once a second.
    """

    def __init__(self, device: torch.device) -> None:
        # Loss times targets, correct predictions, targets: float64 counts without rounding.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._before = (0.0, 0.0)

    def update(self, batch: BatchLoss) -> None:
        """Add the loss and the correct predictions of a batch to the sums."""
        with torch.no_grad():
            self.sums[0] += batch.loss.detach() * batch.num_targets
            self.sums[1] += batch.num_correct
            self.sums[2] += batch.num_targets

    def restore(self, sums: torch.Tensor) -> None:
        """Add the sums of an epoch that a checkpoint has interrupted."""
        self.sums += sums.to(self.sums.device)
        loss, _, count = sums.tolist()
        self._before = (loss, count)

    def since_last(self) -> tuple[float, float]:
        """Return the mean loss since the last call, and the accuracy since the epoch began."""
        loss, num_correct, count = self.sums.tolist()
        loss_before, count_before = self._before
        self._before = (loss, count)
        return (loss - loss_before) / max(count - count_before, 1), num_correct / max(count, 1)

    def over_workers(self, worker: Worker) -> torch.Tensor:
        """Return the sums over all workers, without changing this worker's sums. All workers must call it."""
        return worker.sum(self.sums.clone())


class ClassificationMetrics:
    """Accumulates loss, confusion matrix and worst mistakes over one worker's share of validation images."""

    def __init__(self, classes: int, worker: Worker) -> None:
        self.worker = worker
        self.loss = torch.zeros((), dtype=torch.float64, device=worker.device)
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=worker.device)
        # Confidence, id, label, predicted; float64 holds all of them exactly.
        self.worst = torch.zeros(0, 4, dtype=torch.float64, device=worker.device)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Add the outputs (N, classes), in float32, for a batch."""
        labels, classes = batch.labels, len(self.confusion)
        self.loss += functional.cross_entropy(outputs, labels, reduction="sum")
        confidence, predicted = outputs.softmax(dim=1).max(dim=1)
        pairs = torch.bincount(labels * classes + predicted, minlength=classes * classes)
        self.confusion += pairs.view(classes, classes)
        found = torch.stack([confidence, batch.ids, labels, predicted], dim=1).double()
        # Correct predictions get a negative confidence, which sorts them behind all mistakes.
        found[:, 0] -= 2 * (predicted == labels)
        self.worst = most_confident(torch.cat([self.worst, found]))

    def compute(self) -> Validation:
        """Return the metrics over all workers. All workers must call it."""
        loss = self.worker.sum(self.loss).item()
        confusion = self.worker.sum(self.confusion).cpu()
        parts = self.worker.gathered(self.worst.cpu())
        worst = [row for row in most_confident(torch.cat(parts)).tolist() if row[0] > 0]
        count = int(confusion.sum())
        label, predicted = confusion.nonzero(as_tuple=True)
        return Validation(
            num_samples=count,
            loss=loss / count,
            accuracy=int(confusion.diagonal().sum()) / count,
            confusion=tuple(
                zip(
                    label.tolist(),
                    predicted.tolist(),
                    confusion[label, predicted].tolist(),
                    strict=True,
                )
            ),
            worst=tuple(
                Mistake(id=int(row[1]), label=int(row[2]), predicted=int(row[3]), confidence=row[0])
                for row in worst
            ),
        )


def most_confident(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows with the highest confidence; among equal confidences, those with the lowest ids."""
    by_id = rows[rows[:, 1].argsort()]
    return by_id[by_id[:, 0].argsort(descending=True, stable=True)[:NUM_WORST]]
