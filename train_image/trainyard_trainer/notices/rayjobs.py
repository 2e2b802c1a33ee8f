"""The RayJobs of a namespace, as far as a message about the end of a run needs them."""

from __future__ import annotations

import json
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainyard_trainer.config.notify import Outcome
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, AnyConfig, read_config

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with the pod's token, its namespace and the certificate of the API server."""

PAGE = 100
"""The number of RayJobs in one answer of the API server."""

REQUEST_S = 30.0

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


def api_server(environment: Mapping[str, str], account: Path = ACCOUNT) -> tuple[Get, str]:
    """Return the function that asks the API server with the pod's own token, and the pod's namespace."""
    host = environment["KUBERNETES_SERVICE_HOST"]
    port = environment["KUBERNETES_SERVICE_PORT"]
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    trusted = ssl.create_default_context(cafile=f"{account / 'ca.crt'}")

    def get(path: str) -> dict[str, Any]:
        token = (account / "token").read_text().strip()
        request = urllib.request.Request(
            address + path, headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_S, context=trusted) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    return get, (account / "namespace").read_text().strip()


def ended_rayjobs(get: Get, namespace: str) -> Iterator[EndedRayJob]:
    """Yield the RayJobs of runs with `notify` that have ended."""
    query = {"labelSelector": RUN_LABEL, "limit": f"{PAGE}"}
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs"
    while True:
        page = get(f"{path}?{urllib.parse.urlencode(query)}")
        for job in page["items"]:
            if (ended := _ended(job)) is not None:
                yield ended
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
    config = _config(job) if outcome else None
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


def _config(job: Mapping[str, Any]) -> AnyConfig | None:
    """Return the config of a run in its RayJob; None if another version of trainyard has written it."""
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value", "") for each in head.get("env", [])}
    if CONFIG_VARIABLE not in variables:
        return None
    try:
        return read_config({CONFIG_VARIABLE: variables[CONFIG_VARIABLE].replace("$$", "$")})
    except ValueError:
        return None


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
