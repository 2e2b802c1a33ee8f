"""RayJobs by the method names of KubeRay's Python client, which is on no package index.

KubeRay's client returns None or False for errors; here they are ClusterErrors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainyard.labels import OWNER_LABELS, RUN_LABEL

Object = dict[str, Any]


class Objects(Protocol):
    """The methods of `Cluster` with which RayJobs are created, listed and deleted."""

    @property
    def options(self) -> str: ...
    def create(self, body: Object) -> Object: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        everywhere: bool = False,
        cached: bool = False,
    ) -> list[Object]: ...
    def delete(self, kind: str, name: str) -> None: ...


class RayjobApi:
    """The RayJobs of a cluster's namespace."""

    def __init__(self, cluster: Objects) -> None:
        self._cluster = cluster

    @property
    def options(self) -> str:
        """The options with which a command reaches this namespace, for commands to copy."""
        return self._cluster.options

    def submit_job(self, job: Object) -> Object:
        """Create a RayJob and return it as the API server has stored it."""
        return self._cluster.create(job)

    def get_job(self, name: str) -> Object | None:
        """Return a RayJob by its name, or None if it does not exist."""
        return self._cluster.get("RayJob", name)

    def list_jobs(
        self, run: str | None = None, *, everywhere: bool = False, cached: bool = False
    ) -> list[Object]:
        """Return the RayJobs that trainyard has created, or those of one run, oldest first.

        `everywhere` lists all namespaces. `cached` is for display only: a decision needs the current state.
        """
        labels = OWNER_LABELS | ({RUN_LABEL: run} if run else {})
        jobs = self._cluster.list("RayJob", labels, everywhere=everywhere, cached=cached)
        return sorted(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"]))

    def delete_job(self, name: str) -> None:
        """Delete a RayJob, and with it its RayCluster."""
        self._cluster.delete("RayJob", name)
