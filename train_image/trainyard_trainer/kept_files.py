"""Where workers keep what each of them alone has. Ray Train's controller imports it, so it has no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The files of a node with what workers alone have. They outlive the processes of the workers."""

    folder: Path

    def state(self, rank: int) -> Path:
        """Return the path of the file with the state of a worker, of this node or of another one."""
        return self.folder / f"state-{rank}"

    @property
    def metrics(self) -> Path:
        """Return the path of the file with metrics that worker 0 has not written to the run's folder."""
        return self.folder / "unwritten-metrics"

    def remove_states(self) -> None:
        """Remove the files of all states, which nobody needs any more."""
        for path in self.folder.glob("state-*"):
            path.unlink(missing_ok=True)
