"""What can go wrong with a run, told apart by who must act."""

from __future__ import annotations

from trainyard_trainer.run_files import exit_codes


class TrainerError(Exception):
    """A failure that is explained in its message; a traceback would add nothing."""

    exit_code = exit_codes.FAILED


class ConfigError(TrainerError):
    """The config asks for something that cannot be: no retry will help."""

    exit_code = exit_codes.WRONG_INPUT


class RunError(TrainerError):
    """The run could not go on: the cluster, the storage, or the training itself."""


class Diverged(RunError):
    """The loss or a weight is no number any more: the same steps would lead there again."""


class OutOfMemory(RunError):
    """The run needs more memory than a worker's GPU has: the same run would fail in the same way."""
