"""What can go wrong with a run, told apart by who must act."""

from __future__ import annotations

from typing import Any

from trainyard_trainer.run_files import exit_codes
from trainyard_trainer.run_files.driver_output import STORAGE


class TrainerError(Exception):
    """A failure that is explained in its message; a traceback would add nothing."""

    exit_code: int = exit_codes.FAILED

    is_final: bool = False
    """Whether the same attempt would fail in the same way again, so that a retry is of no use."""


class ConfigError(TrainerError):
    """The config asks for something that cannot be: no retry will help."""

    exit_code = exit_codes.WRONG_INPUT
    is_final = True


class RunError(TrainerError):
    """The run could not go on: the cluster, the storage, or the training itself."""


class UserCodeFailed(RunError):
    """The user's program has ended with an error of its own."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class RecipeError(RunError):
    """The user's recipe is wrong: exact resume leads to the same step, and so to the same error."""

    is_final = True


class DatasetError(RunError):
    """The user's data set has failed to give a sample, or its samples make no batch."""


class Diverged(RunError):
    """The loss or a weight is no number any more: the same steps would lead there again."""

    is_final = True


class OutOfMemory(RunError):
    """The run needs more memory than a worker's GPU has: the same run would fail in the same way."""

    is_final = True


class StorageError(RunError, OSError):
    """An operation on a file or a folder of the storage failed; the system's own error is the cause."""

    def __init__(self, problem: str, errno: int | None = None) -> None:
        super().__init__(f"{STORAGE}{problem}")
        self.problem = problem
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.errno)


class MissingFileError(StorageError, FileNotFoundError):
    """A file or a folder of the storage is not there."""
