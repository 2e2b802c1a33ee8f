"""The ends of drivers, by which exactly one message is sent when a run has ended.

Files in the run's folder:

    last-end.json           how the newest driver of a submission has ended
    notices/CLUSTER.json    the same for the driver in this RayCluster, and what became of its message

A driver that has failed is the end of the run if a retry cannot cure the error, or if KubeRay starts no more
retries. The driver cannot ask KubeRay, so it counts the drivers of its submission that have failed. A driver
that was killed is not counted, so the count may be too low. It is too high only if a RayJob of the same name
is created again within an hour, and the drivers of the one before were killed.

The notice is created before the message is sent, and of several processes one succeeds in that. So a message
is never sent twice. A process that is killed while it sends leaves a notice in the state `sending`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainyard_trainer.config.notify import Outcome
from trainyard_trainer.run_files import names
from trainyard_trainer.run_folder.folder import RunFolder

RETRY_S = 3600.0
"""Seconds after a failure in which KubeRay's retry has begun; a later driver is another submission's."""

State = Literal["none", "sending", "delivered", "not delivered"]
"""What became of the message of an end; `none` if none is due."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverEnd:
    """How a driver has ended, and whether the run has ended with it."""

    submission: str
    """The name of the RayJob."""
    ray_cluster: str
    """The name of the RayCluster, which is another one for each retry."""
    outcome: Outcome
    error: str | None
    """The first line of the error; None if the run has succeeded."""
    is_end: bool
    """Whether the run has ended."""
    is_repeated: bool
    """Whether an earlier driver of the submission has reported the end of the run."""
    failures: int
    """The number of drivers of this submission that have failed in a row."""
    retries_left: int
    """The number of attempts that KubeRay may still start."""
    time: float
    """When the driver ended, in seconds since 1970."""
    state: State = "none"

    def in_state(self, state: State) -> DriverEnd:
        """Return the same end with another state of its message."""
        return replace(self, state=state)


def judge(
    before: DriverEnd | None,
    *,
    submission: str,
    ray_cluster: str,
    outcome: Outcome,
    error: str | None,
    is_final: bool,
    retries: int,
    started: float,
    now: float,
) -> DriverEnd:
    """Return what the end of a driver means for its run.

    `before` is the newest end in the run's folder. `is_final` says that a retry cannot cure the error.
    """
    is_retry = (
        before is not None
        and before.submission == submission
        and before.ray_cluster != ray_cluster
        and before.outcome == "failed"
        and before.retries_left > 0
        and started - before.time <= RETRY_S
    )
    # The same RayJob is created again where it is kept in Git: it finds the run trained, and ends at once.
    is_repeated = (
        before is not None
        and before.submission == submission
        and before.outcome == "succeeded" == outcome
    )
    failures, retries_left = 0, 0
    if outcome == "failed":
        failures = 1
        if before is not None and is_retry:
            failures, is_repeated = before.failures + 1, before.is_end
        retries_left = max(retries + 1 - failures, 0)
    return DriverEnd(
        submission=submission,
        ray_cluster=ray_cluster,
        outcome=outcome,
        error=error,
        is_end=outcome != "failed" or is_final or is_repeated or retries_left == 0,
        is_repeated=is_repeated,
        failures=failures,
        retries_left=retries_left,
        time=now,
    )


def read_last(folder: RunFolder) -> DriverEnd | None:
    """Return the newest end in the run's folder; None if there is none, or if it was withdrawn."""
    path = _last(folder)
    return _parse(folder.read(path)) if folder.exists(path) else None


def claim(folder: RunFolder, end: DriverEnd, key: str | None = None) -> bool:
    """Create the notice of an end. Return False if another process has created it.

    `key` names the notice; by default it is that of the RayCluster.
    """
    if not folder.create(_notice(folder, key or end.ray_cluster), _text(end)):
        return False
    folder.write(_last(folder), _text(end))
    return True


def settle(
    folder: RunFolder, end: DriverEnd, key: str | None = None, *, is_delivered: bool
) -> None:
    """Record what became of the message."""
    settled = end.in_state("delivered" if is_delivered else "not delivered")
    folder.write(_notice(folder, key or end.ray_cluster), _text(settled))


def notices(folder: RunFolder) -> Iterator[tuple[str, DriverEnd]]:
    """Yield the key and the content of each notice in the run's folder."""
    for name in folder.file_names(f"{folder.root}/{names.NOTICES}"):
        key = name.removesuffix(".json")
        if key != name and (end := _parse(folder.read(_notice(folder, key)))) is not None:
            yield key, end


def _last(folder: RunFolder) -> str:
    return f"{folder.root}/{names.LAST_END}"


def _notice(folder: RunFolder, key: str) -> str:
    return f"{folder.root}/{names.NOTICES}/{key}.json"


def _parse(text: bytes) -> DriverEnd | None:
    plain: dict[str, Any] = json.loads(text)
    return DriverEnd(**plain) if plain else None


def _text(end: DriverEnd) -> str:
    return json.dumps(asdict(end), indent=2)
