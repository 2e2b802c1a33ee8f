"""How the training of a worker ended, as the driver gets to know it. The driver needs no torch for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainyard_trainer.run_folder.measurements.progress import Trained
from trainyard_trainer.run_folder.measurements.startup import Startup


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a worker's loop ended, when it did not fail."""

    resumed_from: str | None
    trained: Trained
    startup: Startup
    is_stopped: bool = False
    """Saved and left before the end, because it was asked to."""
    diverged: str | None = None
    """Why going on would be of no use."""

    def to_plain(self) -> dict[str, Any]:
        """For a network that takes no classes of ours."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Outcome:
        trained, startup = Trained(**plain["trained"]), Startup(**plain["startup"])
        return cls(**plain | {"trained": trained, "startup": startup})
