"""The section `checkpoint`: when a run is saved, and which checkpoints are kept."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from trainyard_trainer.config.section import MetricName, PositiveNumber, Section


class CheckpointConfig(Section):
    """When the run is saved, and which checkpoints are kept."""

    every_epochs: PositiveInt = 1
    """Save each time this many epochs have ended, and at the end of the run."""

    every_s: PositiveNumber | None = 300.0
    """Save within an epoch too, when the last checkpoint is this many seconds old; null switches that off."""

    every_samples: PositiveInt | None = None
    """Save within an epoch too, each time about this many more samples have been trained."""

    keep: PositiveInt = 2
    """The number of newest checkpoints that are kept."""

    keep_every_epochs: PositiveInt | None = None
    """Keep one checkpoint for good each time this many epochs have ended."""

    best: MetricName | None = None
    """The metric by which the best checkpoint is chosen, which is always kept: `val_loss`, or a metric of the
    recipe on the validation samples. The default is the recipe's first one, `val_accuracy` for images, text
    and `train.questions`."""

    deliver: Literal["last", "best"] = "last"
    """The checkpoint whose weights become model.pt at the end: the last one or the best one."""


class BoostingCheckpoint(Section):
    """When a run of `gradient_boosting` is saved, and which checkpoints are kept."""

    # A round sees each row once, so the other modules treat it as an epoch of one step.
    every_samples: ClassVar[None] = None
    keep_every_epochs: ClassVar[None] = None

    every_rounds: PositiveInt = 10
    """Save each time this many rounds have ended, and at the end of the run."""

    every_s: PositiveNumber | None = 300.0
    """Save after a round too, when the last checkpoint is this many seconds old; null switches that off."""

    keep: PositiveInt = 2
    """The number of newest checkpoints that are kept."""

    best: MetricName = "val_loss"
    """The metric by which the best checkpoint is chosen, which is always kept: `val_loss`, `val_accuracy` of
    classes, or `val_rmse` of a regression."""

    deliver: Literal["last", "best"] = "last"
    """The checkpoint that becomes the model of the run at the end: the last one or the best one."""

    @property
    def every_epochs(self) -> int:
        return self.every_rounds
