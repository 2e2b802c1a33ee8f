"""The names that launcher and trainer share about runs on a standing RayCluster.

Such a cluster has one head for the drivers of all its runs. Their logs share the output of its container, so
each line begins with the id of the Ray job.
"""

from __future__ import annotations

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
