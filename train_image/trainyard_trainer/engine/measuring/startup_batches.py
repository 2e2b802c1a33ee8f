"""Batches that record when the first batch arrived and when the first step ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.run_folder.measurements.startup import Startup


class StartupBatches:
    """Batches whose first two requests end the start: between them lies the first step."""

    def __init__(
        self, batches: Batches, startup: Startup, started: Callable[[], None] = lambda: None
    ) -> None:
        """`started` is called once, when the start has ended."""
        self._batches = batches
        self._startup = startup
        self._started = started
        self._is_started = False

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for batch in self._batches.epoch(epoch):
            self._startup.reach("first_batch")
            yield batch
            if not self._is_started:
                self._is_started = True
                self._startup.reach("first_step")
                self._started()

    def state(self) -> dict[str, torch.Tensor]:
        return self._batches.state()
