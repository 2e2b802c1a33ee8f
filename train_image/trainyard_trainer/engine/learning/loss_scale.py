"""Scale the sum of losses of each pass, so that a step follows sum / weight of its global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker


class LossScale:
    """Divides the losses of a global batch by its weight, whatever part each worker and each pass has of it.

    Strategies average gradients over workers, so each factor contains the number of workers.
    """

    def __init__(self, worker: Worker, micro_batch_size: int) -> None:
        self._worker = worker
        self._micro_batch_size = micro_batch_size
        self._per_sample: int | None = None
        self._global_samples = 0
        self._total: Tensor | None = None
        self._known: Tensor | None = None

    def begin(self, global_samples: int, weight: Tensor | None = None) -> None:
        """Begin a step with a global batch of so many samples.

        `weight` is that of this worker's share of it, if it is known already. All workers must call it alike.
        """
        self._global_samples = global_samples
        self._total = None
        self._known = None if weight is None else self._inverse(weight.clone())

    def factor(self, weight: Tensor | int, num_samples: int, *, is_empty: bool) -> Tensor | float:
        """Return the factor for the loss of a pass; `weight` is that of `num_samples` samples.

        If `is_empty`, these samples only stand in for none. With a tensor all workers must call it alike.
        """
        workers = self._worker.world_size
        if isinstance(weight, int):
            each = self._weight_per_sample(weight, num_samples)
            factor: Tensor | float = workers / (each * self._global_samples)
        elif self._known is not None:
            factor = self._known
        else:
            weight = torch.zeros_like(weight) if is_empty else weight.detach()
            if self._global_samples <= self._micro_batch_size * workers:
                factor = self._inverse(weight.clone())
            else:
                # The weights of later passes are not known yet: `correction` makes up for that.
                self._total = weight.clone() if self._total is None else self._total + weight
                factor = workers / self._global_samples
        return 0.0 if is_empty else factor

    def correction(self) -> Tensor | None:
        """Return the factor for the gradients of all passes; None if the factors were final."""
        if self._total is None:
            return None
        return self._inverse(self._total) * (self._global_samples / self._worker.world_size)

    def _inverse(self, weight: Tensor) -> Tensor:
        with self._worker.waits.counted(weight.device):
            total = self._worker.sum(weight)
        return torch.where(total > 0, self._worker.world_size / total, 0.0)

    def _weight_per_sample(self, weight: int, num_samples: int) -> int:
        each, rest = divmod(weight, num_samples)
        self._per_sample = self._per_sample or each
        if rest or each != self._per_sample or each < 1:
            due = max(self._per_sample, 1)
            raise ConfigError(
                f"Recipe.loss returned the weight {weight} for {num_samples} samples, which is not {due} for "
                "each sample. If the weight depends on the samples, return it as a scalar tensor on the "
                "device, such as mask.sum()."
            )
        return each
