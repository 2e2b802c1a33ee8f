"""The state of the current epoch of a training loop."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.engine.learning.sums import LossSums
from trainyard_trainer.engine.measuring.timing import Clock, TimeSpent
from trainyard_trainer.run_folder.measurements.progress import Trained


class Interval:
    """The steps since the last recorded metrics; at its first step the loss was known to be finite."""

    def __init__(self, step: int, spent: TimeSpent) -> None:
        self.step = step
        self.clock = Clock()
        self.time_before = spent.snapshot()


class Epoch:
    """The state of the current epoch."""

    def __init__(self, trained: Trained, sums: LossSums, spent: TimeSpent) -> None:
        self.number = trained.epoch
        self.batches: Iterator[Batch] | None = None
        self.batch: Batch | None = None
        """The batch whose step is not complete."""
        self.sums = sums
        self.samples_before = trained.samples
        self.time_before = spent.snapshot()
        self.interval = Interval(trained.step, spent)
