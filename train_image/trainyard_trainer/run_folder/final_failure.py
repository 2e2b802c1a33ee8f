"""Failures that a retry cannot cure: the next attempts of the same submission repeat them at once.

KubeRay starts each retry on a new RayCluster. The attempt that fails leaves a record in the run's folder, and
each retry ends with the recorded error before it reads data or waits for workers. The record counts the
retries that are left, so it is used up when KubeRay starts no more of them. It is also ignored

* by another submission, which has another RayJob;
* after `VALID_S`, since KubeRay starts a retry without delay.

`trainyard submit` withdraws the record of a RayJob that it creates again under the same name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from trainyard_trainer.errors import TrainerError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.submission_names import (
    is_on_standing_cluster,
    submission_of,
)

VALID_S = 900.0
"""Seconds after which a record belongs to an earlier submission of the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalFailure:
    """The first failure of a submission that a retry cannot cure."""

    submission: str
    """The name of the RayJob."""
    attempt: int
    """The attempt that has failed."""
    error: str
    exit_code: int
    retries_left: int
    """The number of attempts that KubeRay still starts."""
    time: float
    """When the newest attempt ended, in seconds since 1970."""


class RepeatedFailure(TrainerError):
    """An earlier attempt of this submission failed with an error that a retry cannot cure."""

    is_final = True

    def __init__(self, failure: FinalFailure) -> None:
        super().__init__(
            f"{failure.error}\n"
            f"       Attempt {failure.attempt} failed with this error, which a retry cannot cure, so this "
            "attempt did not try again.\n       A new submission does."
        )
        self.exit_code = failure.exit_code


def record(
    folder: RunFolder,
    attempt: int,
    error: TrainerError,
    retries: int,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Record the error with which an attempt ends, if a retry cannot cure it and KubeRay would retry."""
    submission = submission_of(environment)
    if not error.is_final or submission is None or retries == 0:
        return
    if is_on_standing_cluster(environment):
        return  # KubeRay retries nothing there, and the process that does sees the exit code.
    failure = FinalFailure(
        submission=submission,
        attempt=attempt,
        error=str(error),
        exit_code=error.exit_code,
        retries_left=retries,
        time=time.time(),
    )
    _write(folder, failure)


def raise_again(folder: RunFolder, environment: Mapping[str, str] = os.environ) -> None:
    """Raise RepeatedFailure if this attempt is a retry after a failure that a retry cannot cure."""
    submission = submission_of(environment)
    if submission is None or (failure := _read(folder)) is None:
        return
    if failure.submission != submission or time.time() - failure.time > VALID_S:
        folder.delete(f"{folder.root}/{names.FINAL_FAILURE}")
        return
    if failure.retries_left > 1:
        left = failure.retries_left - 1
        _write(folder, replace(failure, retries_left=left, time=time.time()))
    else:
        folder.delete(f"{folder.root}/{names.FINAL_FAILURE}")
    raise RepeatedFailure(failure)


def _read(folder: RunFolder) -> FinalFailure | None:
    path = f"{folder.root}/{names.FINAL_FAILURE}"
    if not folder.exists(path):
        return None
    plain = json.loads(folder.read(path))
    return FinalFailure(**plain) if plain else None


def _write(folder: RunFolder, failure: FinalFailure) -> None:
    folder.write(f"{folder.root}/{names.FINAL_FAILURE}", json.dumps(asdict(failure), indent=2))
