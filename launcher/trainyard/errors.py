"""The launcher's errors, told apart by who must act; each kind has its exit code."""

from __future__ import annotations

from typing import ClassVar

from trainyard_trainer.run_files import exit_codes


class LauncherError(Exception):
    """What went wrong, the numbers, the remedy: one line each.

    The first line is the message; the others are printed below it, indented.
    """

    exit_code: ClassVar[int]

    def __init__(self, what: str, *details: str) -> None:
        super().__init__(what)
        self.what = what
        self.details = details

    def __str__(self) -> str:
        return "\n".join([f"error: {self.what}", *(f"       {line}" for line in self.details)])


class ConfigError(LauncherError):
    """Your input is wrong: a run file, an option, a platform file."""

    exit_code = exit_codes.WRONG_INPUT


class ClusterError(LauncherError):
    """The cluster refused. `reason` is Kubernetes' own, such as `Forbidden`."""

    exit_code = exit_codes.CLUSTER_REFUSED

    def __init__(self, what: str, *details: str, reason: str = "") -> None:
        super().__init__(what, *details)
        self.reason = reason


class ClusterUnreachable(ClusterError):
    """The cluster gave no answer at all."""


class TimedOut(LauncherError):
    """The run has not ended in the time for which a command waits; it goes on."""

    exit_code = exit_codes.TIMED_OUT


class RunFailed(LauncherError):
    """The run was carried out and ended badly, or was stopped."""

    exit_code = exit_codes.FAILED


class RunStopped(RunFailed):
    """The run was told to stop, or has stopped at its limit; started again, it goes on from there."""
