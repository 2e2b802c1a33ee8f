"""Find the pod in which a worker of a run is running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.errors import ConfigError
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

Object = dict[str, Any]


class PodReader(Protocol):
    """The part of `Cluster` with which one pod is read."""

    @property
    def options(self) -> str: ...
    def get(self, kind: str, name: str) -> Object | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLocation:
    """The pod and the container in which a worker is running."""

    pod: str
    container: str
    ray_worker: str
    """Ray's id of the worker process, which is part of the names of its log files."""
    process: int
    """The id of the worker process in the container."""


def locate_worker(
    cluster: PodReader, run: str, workers: list[Object], rank: int, job: Object | None = None
) -> WorkerLocation:
    """Return where the worker of a rank is running; `workers` are the entries of the run's workers.json.

    `job` is the RayJob of the run. Without it, the run has a RayCluster of its own.

    Raises ConfigError if the run has no such rank, or if the pod is gone.
    """
    found = next((worker for worker in workers if worker["rank"] == rank), None)
    if found is None:
        raise ConfigError(
            f"run {run} has no worker of rank {rank}",
            f"Its workers have the ranks 0 to {len(workers) - 1}."
            if workers
            else "Its workers have not started yet, or it was trained by an older image.",
        )
    name = found["node"]
    pod = cluster.get("Pod", name)
    labels = OWNER_LABELS | {RUN_LABEL: run}
    if job is not None and standing_cluster_of(job) is not None:
        labels = job["spec"]["clusterSelector"]
    if pod is None or not labels.items() <= _labels(pod).items():
        raise ConfigError(
            f"worker {rank} of run {run} ran in pod {name}, which is gone",
            f"Its log is in the run's folder: `trainyard logs {run} --worker {rank} {cluster.options}`.",
        )
    container = pod["spec"]["containers"][0]["name"]
    return WorkerLocation(
        pod=name,
        container=container,
        ray_worker=found["ray_worker"],
        process=found["process"],
    )


def _labels(pod: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = pod["metadata"].get("labels", {})
    return labels
