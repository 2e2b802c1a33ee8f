"""A cluster in memory, for pure code alone; the same behaviour is shown on a real one by tests/e2e."""

from __future__ import annotations

import copy
from typing import Any

from launcher.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]


class FakeCluster:
    """Objects by kind and name. `script` is what happens to the one RayJob at each tick: a pair
    of statuses, None for its deletion, or `silent` for a cluster that does not answer."""

    namespace = "team"

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.logs: dict[str, str] = {}
        self.script: list[Any] = []
        self.silent = False
        self.calls: list[tuple[str, str, str]] = []

    def add_job(self, name: str, *, status: str = "", run: str = "digits") -> Object:
        deployment = {"RUNNING": "Running", "SUCCEEDED": "Complete", "FAILED": "Failed"}
        job = {
            "kind": "RayJob",
            "metadata": {
                "name": name,
                "creationTimestamp": f"2026-01-01T00:00:{len(self.objects):02}Z",
                "labels": {
                    "app.kubernetes.io/managed-by": "trainyard",
                    "trainyard.io/run": run,
                },
            },
            "status": {
                "jobStatus": status,
                "jobDeploymentStatus": deployment.get(status, ""),
                "rayClusterName": f"{name}-abc",
            },
        }
        self.objects["RayJob", name] = job
        return job

    def add_head(self, ray_cluster: str, log: str) -> None:
        name = f"{ray_cluster}-head"
        labels = {"ray.io/cluster": ray_cluster, "ray.io/node-type": "head"}
        self.objects["Pod", name] = {
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "status": {"phase": "Running"},
        }
        self.logs[name] = log

    def tick(self) -> None:
        event = self.script.pop(0)
        self.silent = event == "silent"
        ((key, job),) = self.objects.items()
        if event is None:
            del self.objects[key]
        elif not self.silent:
            job["status"].update(jobDeploymentStatus=event[0], jobStatus=event[1])

    def create(self, body: Object) -> Object:
        self.calls.append(("create", body["kind"], body["metadata"]["name"]))
        self.objects[body["kind"], body["metadata"]["name"]] = copy.deepcopy(body)
        return body

    def get(self, kind: str, name: str) -> Object | None:
        if self.silent:
            raise ClusterUnreachable("silent")
        return self.objects.get((kind, name))

    def list(self, kind: str, labels: dict[str, str]) -> list[Object]:
        return [
            found
            for (its_kind, _), found in self.objects.items()
            if its_kind == kind and labels.items() <= found["metadata"]["labels"].items()
        ]

    def delete(self, kind: str, name: str) -> None:
        self.calls.append(("delete", kind, name))
        self.objects.pop((kind, name), None)

    def log(self, pod: str, container: str, since_s: int | None = None) -> str:
        if pod not in self.logs:
            raise ClusterError("no such pod", reason="NotFound")
        return self.logs[pod]
