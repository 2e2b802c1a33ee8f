"""What a training loop records, without how and where."""

from __future__ import annotations

from typing import Any, Protocol

from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.sums import Validation
from trainyard_trainer.engine.regrouping import Agreement
from trainyard_trainer.run_folder.measurements.progress import MetricsRecord, Trained


class RunRecords(Protocol):
    """What a worker writes to the run's folder while it trains."""

    def report(self, record: MetricsRecord) -> None:
        """Record metrics. Only rank 0 calls it."""

    def save(
        self,
        trained: Trained,
        learner: Learner,
        partial_epoch: dict[str, Any],
        validation: Validation | None,
    ) -> None:
        """Begin to save a checkpoint, once an earlier save is done. All workers must call it.

        `partial_epoch` is the state of an interrupted epoch; it is empty at the end of an epoch.
        """

    def is_saving(self) -> bool:
        """Whether a save is in progress."""

    def finish_saving(self) -> None:
        """Wait for the save that is in progress."""

    def note_replacement(self, agreement: Agreement, *, began: float) -> None:
        """Record that workers were replaced; the failure was noticed at time.time() `began`."""


class NoRecords:
    """The records of a worker that writes nothing."""

    def report(self, record: MetricsRecord) -> None:
        """Ignore the metrics: this run keeps no records."""

    def save(
        self,
        trained: Trained,
        learner: Learner,
        partial_epoch: dict[str, Any],
        validation: Validation | None,
    ) -> None:
        """Save nothing: this run keeps no checkpoints."""

    def is_saving(self) -> bool:
        """Return False: nothing is ever saved."""
        return False

    def finish_saving(self) -> None:
        """Return at once: nothing is ever saved."""

    def note_replacement(self, agreement: Agreement, *, began: float) -> None:
        """Record nothing: rank 0 does."""
