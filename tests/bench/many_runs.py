"""Many runs on the test cluster, with pods on nodes that do not exist.

The RayJobs belong to a controller that is not there, so the operator leaves them alone. What stands in
their status was taken from real ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kubernetes

from tests.bench.rounds import ROOT, say
from trainyard.cluster.cluster import Cluster
from trainyard.planning.objects import run_objects
from trainyard.platform import load_platform
from trainyard.run_file.load import load_run

NAMESPACE = "trainyard-scale"
MADE_UP = "trainyard.io/made-up"
PODS_PER_RUN = 10
WAITING_IN = 20
"""One run in so many waits for GPUs that are not there."""
THREADS = 16

Object = dict[str, Any]


def rayjobs(count: int) -> list[Object]:
    """What `submit` would send for so many runs, left alone by the operator."""
    run = load_run(ROOT / "examples/digits.yaml", gpus="8")
    job = run_objects(run, load_platform(None), NAMESPACE).job
    made = []
    for number in range(count):
        one = copy.deepcopy(job)
        name = f"run-{number:04}"
        one["metadata"]["name"] = f"{name}-{number:08x}"
        one["metadata"]["labels"]["trainyard.io/run"] = name
        one["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
        made.append(one)
    return made


def status_of(job: Object, number: int) -> Object:
    name = job["metadata"]["name"]
    is_waiting = number % WAITING_IN == 0
    of_cluster = {
        "state": "" if is_waiting else "ready",
        "desiredWorkerReplicas": PODS_PER_RUN - 1,
        "readyWorkerReplicas": 0 if is_waiting else PODS_PER_RUN - 1,
        "desiredCPU": "160",
        "desiredMemory": "1024Gi",
        "desiredGPU": str(8 * (PODS_PER_RUN - 1)),
        "desiredTPU": "0",
    }
    return {
        "jobDeploymentStatus": "Initializing" if is_waiting else "Running",
        "jobStatus": "" if is_waiting else "RUNNING",
        "jobId": f"{name}-abcde",
        "rayClusterName": f"{name}-abcde",
        "startTime": "2026-01-01T00:00:00Z",
        "failed": 0,
        "succeeded": 0,
        "rayClusterStatus": of_cluster,
    }


def pods(job: Object, number: int, nodes: int) -> Iterable[Object]:
    """Head and workers; a waiting run's ask for a node that nobody has."""
    name = job["metadata"]["name"]
    spec = job["spec"]["rayClusterSpec"]
    groups = [("head", spec["headGroupSpec"])]
    groups += [("worker", spec["workerGroupSpecs"][0])] * (PODS_PER_RUN - 1)
    for place, (kind, group) in enumerate(groups):
        pod = copy.deepcopy(group["template"])
        labels = {"ray.io/cluster": f"{name}-abcde", "ray.io/node-type": kind}
        pod["metadata"].setdefault("labels", {}).update(labels | job["metadata"]["labels"])
        pod["metadata"]["name"] = f"{name}-abcde-{kind}-{place}"
        pod["spec"].pop("serviceAccountName", None)
        pod["spec"]["tolerations"] = [{"key": MADE_UP, "operator": "Exists"}]
        if number % WAITING_IN == 0:
            pod["spec"]["nodeSelector"] = {"nobody": "has"}
        else:
            pod["spec"]["nodeName"] = f"made-up-{(number * PODS_PER_RUN + place) % nodes}"
        # What the nodes have does not matter here.
        pod["spec"]["containers"][0].pop("resources", None)
        yield {"apiVersion": "v1", "kind": "Pod", **pod}


def fill(count: int, nodes: int) -> None:
    """So many runs, each with its pods."""
    kubectl("create", "namespace", NAMESPACE)
    cluster = Cluster(NAMESPACE)
    kubernetes.config.load_kube_config()
    statuses = kubernetes.client.CustomObjectsApi()
    jobs = rayjobs(count)

    def start(number: int) -> None:
        job = jobs[number]
        name = cluster.create(job)["metadata"]["name"]
        statuses.patch_namespaced_custom_object_status(
            "ray.io", "v1", NAMESPACE, "rayjobs", name, {"status": status_of(job, number)}
        )
        for pod in pods(job, number, nodes):
            cluster.create(pod)

    at_once(start, count)
    say(f"{count} runs with {count * PODS_PER_RUN} pods")


def at_once(work: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(work, range(count)):
            pass


def running() -> int:
    """How many of the pods say that they run."""
    found = Cluster(NAMESPACE).list("Pod", fields="status.phase=Running")
    return len(found)


def kubectl(*arguments: str) -> None:
    subprocess.run(["kubectl", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.many_runs", allow_abbrev=False)
    parser.add_argument("what", choices=("fill", "running", "remove"))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100)
    wanted = parser.parse_args()
    if wanted.what == "fill":
        fill(wanted.runs, wanted.nodes)
    elif wanted.what == "running":
        json.dump(running(), sys.stdout)
    else:
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")


if __name__ == "__main__":
    main()
