"""How well a model does: sums that stay on the device, and the mistakes worth looking at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.parallel.strategy import Worker

NUM_WORST = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A validation image that the model took for something else."""

    id: int
    label: int
    predicted: int
    confidence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What a model says of all validation samples."""

    num_samples: int
    loss: float
    accuracy: float
    confusion: tuple[tuple[int, int, int], ...]
    """(label, predicted, how many), where there are any."""
    worst: tuple[Mistake, ...]
    """The most confident first."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Judged(NamedTuple):
    """What a model's outputs for some samples are worth."""

    loss: torch.Tensor
    """The mean."""
    hits: torch.Tensor
    total: int
    """Of what was judged: images, or bytes of text."""


class Tally:
    """Loss and hits, summed on the device: reading them makes the host wait, so it is done rarely."""

    def __init__(self, device: torch.device) -> None:
        # Loss times count, hits, count. In float64, which counts without rounding.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.last = (0.0, 0.0)

    def add(self, judged: Judged) -> None:
        with torch.no_grad():
            self.sums[0] += judged.loss.detach() * judged.total
            self.sums[1] += judged.hits
            self.sums[2] += judged.total

    def go_on_from(self, sums: torch.Tensor) -> None:
        """With what was summed before the run was cut."""
        self.sums += sums.to(self.sums.device)
        loss, _, count = sums.tolist()
        self.last = (loss, count)

    def since_last(self) -> tuple[float, float]:
        """Mean loss since the last call, and accuracy since the start."""
        loss, hits, count = self.sums.tolist()
        loss_before, count_before = self.last
        self.last = (loss, count)
        return (loss - loss_before) / max(count - count_before, 1), hits / max(count, 1)

    def total(self, worker: Worker) -> torch.Tensor:
        """The sums over all workers; they stay what they are."""
        return worker.sum(self.sums.clone())


class Answers:
    """Gathers what one worker's share of the validation images comes out as."""

    def __init__(self, classes: int, worker: Worker) -> None:
        self.worker = worker
        self.loss = torch.zeros((), dtype=torch.float64, device=worker.device)
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=worker.device)
        # Confidence, id, label, predicted; float64 holds all of them exactly.
        self.worst = torch.zeros(0, 4, dtype=torch.float64, device=worker.device)

    def add(self, outputs: torch.Tensor, batch: Batch) -> None:
        labels, classes = batch.labels, len(self.confusion)
        self.loss += functional.cross_entropy(outputs, labels, reduction="sum")
        confidence, predicted = outputs.softmax(dim=1).max(dim=1)
        pairs = torch.bincount(labels * classes + predicted, minlength=classes * classes)
        self.confusion += pairs.view(classes, classes)
        found = torch.stack([confidence, batch.ids, labels, predicted], dim=1).double()
        # Who is right is sorted behind all who are wrong.
        found[:, 0] -= 2 * (predicted == labels)
        self.worst = most_confident(torch.cat([self.worst, found]))

    def over_all(self) -> Validation:
        """Of all workers together; all of them must ask."""
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
    """Of equals, of which a model that is sure has many, those with the lowest ids."""
    by_id = rows[rows[:, 1].argsort()]
    return by_id[by_id[:, 0].argsort(descending=True, stable=True)[:NUM_WORST]]
