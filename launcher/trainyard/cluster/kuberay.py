"""RayJobs by the method names of upstream's Python client, which is on no package index.

Upstream's client answers errors with None or False; here they are ClusterErrors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainyard.labels import OWNER_LABELS, RUN_LABEL

Object = dict[str, Any]


class Objects(Protocol):
    """What is needed of a cluster."""

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

    def submit_job(self, job: Object) -> Object:
        """The stored RayJob."""
        return self._cluster.create(job)

    def get_job(self, name: str) -> Object | None:
        """The RayJob, or None."""
        return self._cluster.get("RayJob", name)

    def list_jobs(
        self, run: str | None = None, *, everywhere: bool = False, cached: bool = False
    ) -> list[Object]:
        """Our RayJobs, or those of one run, oldest first; of this namespace, or of all.

        `cached` is for who looks; who decides something by the answer needs the state of now.
        """
        labels = OWNER_LABELS | ({RUN_LABEL: run} if run else {})
        jobs = self._cluster.list("RayJob", labels, everywhere=everywhere, cached=cached)
        return sorted(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"]))

    def delete_job(self, name: str) -> None:
        """Have the RayJob and its cluster deleted."""
        self._cluster.delete("RayJob", name)
