"""The samples of a run that are still to be trained on, and how many of them each worker gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.run_folder.measurements.progress import Length, Trained


@dataclass(frozen=True, slots=True)
class RemainingSamples:
    """The samples that a group of workers still has to train on. It is the same on all workers."""

    prepared: Prepared
    length: Length
    start: Trained
    used: np.ndarray
    """Whether the current epoch has used a sample when the group starts, (N,) bool."""
    world_size: int
    config: TrainerConfig

    @property
    def data(self) -> Data:
        """The config's section `data`, which names a source: no other is read by Ray Data."""
        data = self.config.data
        assert isinstance(data, Data)
        return data

    def first_step(self, epoch: int) -> int:
        return self.start.steps_in_epoch if epoch == self.start.epoch else 0

    def unused(self, epoch: int) -> np.ndarray:
        """Return the ids of the samples that this group uses in an epoch."""
        if self.first_step(epoch):
            return np.flatnonzero(~self.used)
        return np.arange(self.length.num_samples)

    def apart(self, epoch: int) -> np.ndarray:
        """Return the ids that are kept out of the stream, which gives all workers the same number of samples.

        The first workers get one of them each with the last batch of an epoch. A full batch needs none.
        """
        last = self.length.batch_size(self.length.steps_per_epoch - 1)
        unused = self.unused(epoch)
        return unused[len(unused) - last % self.world_size :]

    def streamed(self, epoch: int) -> list[int]:
        """Return the number of samples of each batch that one worker gets from the stream."""
        steps = range(self.first_step(epoch), self.length.steps_per_epoch)
        return [self.length.batch_size(step) // self.world_size for step in steps]
