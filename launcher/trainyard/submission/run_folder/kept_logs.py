"""Choose a log of a driver or of a worker among the files of a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.names import WorkerLogName


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedLog:
    """Which log of a run is wanted; by default the newest one of the driver."""

    worker: int | None = None
    """The rank of a worker; None for the driver."""
    attempt: int | None = None
    """The attempt; None for any."""
    is_previous: bool = False
    """Whether it is the log before the newest one."""

    def choose(self, run: str, files: Sequence[str]) -> str:
        """Return the path of the log in the run's folder. Raises ConfigError if it is not there."""
        return self._of_driver(run, files) if self.worker is None else self._of_worker(run, files)

    def _of_driver(self, run: str, files: Sequence[str]) -> str:
        kept = attempts_with_log(files)
        if self.is_previous and len(kept) > 1:
            return names.log_of(kept[-2])
        attempt = self.attempt or (kept[-1] if kept and not self.is_previous else None)
        if attempt not in kept:
            which = "before the last" if attempt is None else attempt
            raise ConfigError(
                f"run {run} has no log of attempt {which}",
                f"It has those of: {', '.join(map(str, kept)) or 'none'}.",
            )
        return names.log_of(attempt)

    def _of_worker(self, run: str, files: Sequence[str]) -> str:
        """Return the log of the rank's newest process, or of the process before it."""
        parsed = filter(None, map(WorkerLogName.parse, files))
        logs = sorted(log for log in parsed if log.rank == self.worker)
        found = [log for log in logs if self.attempt in (None, log.attempt)]
        place = -2 if self.is_previous else -1
        if len(found) < -place:
            which = "before the newest one" if self.is_previous else ""
            which = f"of attempt {self.attempt}" if self.attempt else which
            there = ", ".join(f"{log.attempt}.{log.group}" for log in logs)
            raise ConfigError(
                f"the folder of run {run} has no log of worker {self.worker} {which}".rstrip(),
                f"It has its logs of attempt and worker group: {there}."
                if there
                else "Workers of torchrun and of --without-ray have no log of their own: their output is in "
                f"the driver's log (`trainyard logs {run}`).",
            )
        return str(found[place])


def attempts_with_log(files: Sequence[str]) -> list[int]:
    """Return the attempts whose driver's log is among the files, oldest first."""
    attempts = map(names.attempt_of_log, files)
    return sorted(attempt for attempt in attempts if attempt is not None)
