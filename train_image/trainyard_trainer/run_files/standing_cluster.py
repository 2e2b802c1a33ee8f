"""What launcher and trainer share about runs on a standing RayCluster: names, and the driver's variables.

On a RayCluster of its own, the environment variables of a run's driver are those of the head's container. On
a standing RayCluster, whose pods exist before the run, they are in the runtime environment of the Ray job.

Such a cluster has one head for the drivers of all its runs. Their logs share the output of its container, so
each line begins with the id of the Ray job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CLUSTER_VARIABLE = "TRAINYARD_STANDING_CLUSTER"
"""The environment variable of a driver with the name of the standing RayCluster on which it runs."""

RETRIES_VARIABLE = "TRAINYARD_RETRIES"
"""The one with the number of attempts that may follow a failed one. On a RayCluster of its own a run has no
such variable, because KubeRay starts its attempts."""

PLACES_VARIABLE = "TRAINYARD_PLACES"
"""The one with the number of workers for which the cluster has places, if it deletes its worker pods while no
run uses them."""

ATTEMPT_VARIABLE = "TRAINYARD_ATTEMPT_OF_JOB"
"""The one with the number of an attempt among those of its Ray job."""


def run_of_job(job: str) -> str:
    """Return the name of the run whose Ray job has an id.

    >>> run_of_job("my-digits-1a2b3c4d-x7k2p")
    'my-digits'
    """
    return job.rsplit("-", 2)[0]


def line_prefix(job: str) -> str:
    """Return the beginning of each line that the driver of a Ray job writes to the head container's output.

    >>> line_prefix("digits-1a2b3c4d-x7k2p")
    '[digits-1a2b3c4d-x7k2p] '
    """
    return f"[{job}] "


def standing_cluster_of(job: Mapping[str, Any]) -> str | None:
    """Return the name of the standing RayCluster that a RayJob uses; None if it has one of its own."""
    name: str | None = (job.get("spec", {}).get("clusterSelector") or {}).get("ray.io/cluster")
    return name


def driver_variables(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a RayJob's driver as the driver reads them.

    Those that come from a Secret are left out. A RayJob that trainyard has not made may have none.
    """
    spec = job.get("spec", {})
    if standing_cluster_of(job) is not None:
        return job_variables(spec)
    head = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    containers = head.get("spec", {}).get("containers") or [{}]
    # Kubernetes reads $$ as $.
    return {
        each["name"]: each["value"].replace("$$", "$")
        for each in containers[0].get("env") or []
        if "value" in each
    }


def job_variables(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables in the runtime environment of a RayJob."""
    try:
        found: dict[str, str] = json.loads(spec.get("runtimeEnvYAML") or "{}").get("env_vars", {})
    except (ValueError, AttributeError):
        return {}
    return found
