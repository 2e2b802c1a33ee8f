"""The names by which the records in a run's folder tell submissions and their attempts apart.

On a RayCluster of its own, each attempt of a run has another RayCluster, named like the RayJob with a random
suffix. On a standing RayCluster, all attempts of a submission are processes of one Ray job, whose id has such
a suffix, and they are numbered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainyard_trainer.environment import ray_job_of
from trainyard_trainer.run_files.standing_cluster import ATTEMPT_VARIABLE, CLUSTER_VARIABLE

RAY_CLUSTER_VARIABLE = "RAY_CLUSTER_NAME"
"""KubeRay's variable with the name of the RayCluster: the name of the RayJob and a random suffix."""


def is_on_standing_cluster(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the driver runs on a standing RayCluster, which other runs use as well."""
    return CLUSTER_VARIABLE in environment


def submission_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the RayJob that this driver belongs to; None outside of a RayJob's head.

    >>> submission_of({"RAY_CLUSTER_NAME": "digits-1a2b3c4d-x7k2p"})
    'digits-1a2b3c4d'
    """
    return _unique_name(environment).rpartition("-")[0] or None


def attempt_cluster(environment: Mapping[str, str] = os.environ) -> str:
    """Return a name that each attempt of a submission has for itself: on a RayCluster of its own, the name
    of the RayCluster."""
    if is_on_standing_cluster(environment):
        return f"{_unique_name(environment)}-{environment.get(ATTEMPT_VARIABLE, '1')}"
    return _unique_name(environment)


def _unique_name(environment: Mapping[str, str]) -> str:
    """Return the name of the RayJob with a random suffix; empty outside of a RayJob's head."""
    if is_on_standing_cluster(environment):
        return ray_job_of(environment) or ""
    return environment.get(RAY_CLUSTER_VARIABLE, "")
