"""The RayJobs of a namespace, as far as programs that report about runs need them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainyard_trainer.config.notify import Outcome
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, AnyConfig, read_config
from trainyard_trainer.run_files.standing_cluster import driver_variables

PAGE = 100
"""The number of RayJobs in one answer of the API server."""

RUN_LABEL = "trainyard.io/run"

Get = Callable[[str], dict[str, Any]]
"""Returns the answer of the API server to a path with its query."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRayJob:
    """A RayJob that has ended."""

    name: str
    uid: str
    created: float
    """When it was created, in seconds since 1970."""
    ended: float
    outcome: Outcome
    reason: str
    """Why it has failed, as KubeRay reports it; empty if it does not."""
    config: AnyConfig


def ended_rayjobs(get: Get, namespace: str) -> Iterator[EndedRayJob]:
    """Yield the RayJobs of runs with `notify` that have ended."""
    for job in rayjobs(get, namespace):
        if (ended := _ended(job)) is not None:
            yield ended


def rayjobs(get: Get, namespace: str) -> Iterator[dict[str, Any]]:
    """Yield the RayJobs of runs."""
    query = {"labelSelector": RUN_LABEL, "limit": f"{PAGE}"}
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs"
    while True:
        page = get(f"{path}?{urllib.parse.urlencode(query)}")
        yield from page["items"]
        following = page["metadata"].get("continue")
        if not following:
            return
        query["continue"] = following


def outcome_of(status: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome in the status of a RayJob; None if it has not ended."""
    deployment, job = status.get("jobDeploymentStatus"), status.get("jobStatus")
    if deployment in ("Failed", "ValidationFailed") or (
        deployment == "Complete" and job == "FAILED"
    ):
        return "failed"
    if deployment == "Complete":
        return "succeeded" if job == "SUCCEEDED" else "stopped"
    return None


def _ended(job: Mapping[str, Any]) -> EndedRayJob | None:
    """Return a RayJob that has ended; None for any other, and for one without `notify`."""
    status, metadata = job.get("status") or {}, job["metadata"]
    outcome = outcome_of(status)
    config = config_of(job) if outcome else None
    if outcome is None or config is None or config.notify is None:
        return None
    created = _seconds(metadata["creationTimestamp"])
    return EndedRayJob(
        name=metadata["name"],
        uid=metadata["uid"],
        created=created,
        ended=_seconds(status["endTime"]) if status.get("endTime") else created,
        outcome=outcome,
        reason=f"{status.get('reason') or ''}",
        config=config,
    )


def config_of(job: Mapping[str, Any]) -> AnyConfig | None:
    """Return the config of a run in its RayJob; None if another version of trainyard has written it."""
    variables = driver_variables(job)
    if CONFIG_VARIABLE not in variables:
        return None
    try:
        return read_config({CONFIG_VARIABLE: variables[CONFIG_VARIABLE]})
    except ValueError:
        return None


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
