"""`checkpoint`: when a run is saved, and what stays."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from trainyard_trainer.config.section import Metric, PositiveNumber, Section


class CheckpointConfig(Section):
    """When the run is saved, and what stays."""

    every_epochs: PositiveInt = 1
    """Save after each so many epochs, and at the end."""

    every_s: PositiveNumber | None = 300.0
    """Save within an epoch, too, when the last checkpoint is so many seconds old; null for never."""

    every_samples: PositiveInt | None = None
    """Save within an epoch, too, each time that about so many samples more have been trained."""

    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""

    keep_every_epochs: PositiveInt | None = None
    """Of each so many epochs one checkpoint stays for good."""

    best: Metric = "val_accuracy"
    """The best checkpoint by this always stays: `val_accuracy` the highest, `val_loss` the lowest."""

    deliver: Literal["last", "best"] = "last"
    """Whose weights become model.pt at the end."""


class BoostingCheckpoint(Section):
    """When a run of `gradient_boosting` is saved, and what stays."""

    # A round sees each row once: it is an epoch of one step to all that knows no rounds.
    every_samples: ClassVar[None] = None
    keep_every_epochs: ClassVar[None] = None

    every_rounds: PositiveInt = 10
    """Save after each so many rounds, and at the end."""

    every_s: PositiveNumber | None = 300.0
    """Save after a round, too, when the last checkpoint is so many seconds old; null for never."""

    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""

    best: Metric = "val_loss"
    """The best checkpoint by this always stays: `val_loss` the lowest, `val_accuracy` the highest."""

    deliver: Literal["last", "best"] = "last"
    """Which checkpoint becomes the run's model at the end."""

    @property
    def every_epochs(self) -> int:
        return self.every_rounds
