"""Pods ask for what a cluster may have and this machine has not: a runtime class, a second scheduler, a CSI
driver, local disks, huge pages and RDMA devices. The real API server and scheduler decide about them.

The namespace enforces Pod Security "restricted". The nodes do not exist, so no container starts: what a
driver, a runtime or a device does is not tested.

| node | sandbox | huge pages | RDMA device | local disk |
|---|---|---|---|---|
| 0 | | | | |
| 1 | yes | yes | yes | yes |
| 2 | yes | yes | | yes |
| 3 | | yes | yes | yes |
| 4 | yes | yes | yes | |
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import CLUSTER_HOME, Object, Team, get, kubectl, wait_for
from made_up_nodes import (
    MADE_UP,
    TOLERATION,
    MadeUpNode,
    free_all_nodes,
    made_up_nodes,
    placed,
    pods_of,
)

NAME = "trainyard-e2e-features"
"""The name of the runtime class, the scheduler, the storage class and the priority of their objects."""
DRIVER = "lustre.example.com"
HUGE, RDMA = "hugepages-2Mi", "rdma/hca"
SANDBOX = {"sandbox": "yes"}
OVERHEAD = {"cpu": "250m", "memory": "120Mi"}
DISK_GIB = 100

BOTH = {HUGE: "4Gi", RDMA: "1"}
LAB = {"machine": "lab"}
NODES = (
    MadeUpNode(labels={"role": "head"}),
    MadeUpNode(labels=LAB | SANDBOX, resources=BOTH),
    MadeUpNode(labels=LAB | SANDBOX, resources={HUGE: "4Gi"}),
    MadeUpNode(labels=LAB, resources=BOTH),
    MadeUpNode(labels=LAB | SANDBOX, resources=BOTH),
)
WITH_DISK = ("made-up-1", "made-up-2", "made-up-3")

POD: Object = {
    "runtimeClassName": NAME,
    "schedulerName": NAME,
    "resources": {HUGE: "2Gi", RDMA: "1"},
    "volumes": [
        {"name": "huge", "emptyDir": {"medium": "HugePages"}},
        {"name": "lustre", "csi": {"driver": DRIVER, "volumeAttributes": {"share": "scratch"}}},
        {
            "name": "nvme",
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {
                        "storageClassName": NAME,
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": f"{DISK_GIB}Gi"}},
                    }
                }
            },
        },
    ],
    "volumeMounts": [
        {"name": "huge", "mountPath": "/hugepages"},
        {"name": "lustre", "mountPath": "/lustre"},
        {"name": "nvme", "mountPath": "/nvme"},
    ],
}


def disk(node: str) -> Object:
    """A volume on the disk of a node."""
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{NAME}-{node}", "labels": {"e2e": NAME}},
        "spec": {
            "storageClassName": NAME,
            "capacity": {"storage": f"{DISK_GIB}Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": "/mnt/nvme"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


def objects() -> list[Object]:
    """What an administrator of such a cluster has created."""
    named = {"metadata": {"name": NAME, "labels": {"e2e": NAME}}}
    return [
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "handler": "runsc",
            "scheduling": {"nodeSelector": SANDBOX},
            "overhead": {"podFixed": OVERHEAD},
            **named,
        },
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
            **named,
        },
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIDriver",
            "metadata": {"name": DRIVER, "labels": {"e2e": NAME}},
            "spec": {"attachRequired": False, "volumeLifecycleModes": ["Ephemeral"]},
        },
        *map(disk, WITH_DISK),
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """The nodes and the objects of the cluster."""
    kinds = "runtimeclasses,storageclasses,csidrivers,persistentvolumes"
    with made_up_nodes(*NODES):
        for each in objects():
            kubectl("apply", "-f", "-", stdin=json.dumps(each))
        yield
        kubectl("delete", kinds, "-l", f"e2e={NAME}", "--wait=false")


@pytest.fixture(scope="module")
def team(
    cluster: None, make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Team:
    """A team with one pool whose pods ask for everything, and one whose runtime class is missing."""
    team = make_team("features")
    sizes = {"gpusPerNode": 8, "cpus": 16, "memoryGib": 64, "gpuResource": "nvidia.com/gpu"}
    nodes = {"nodeSelector": LAB, "tolerations": [TOLERATION]}
    team.install(
        tmp_path_factory.mktemp("values"),
        head__nodeSelector={MADE_UP: "true", "role": "head"},
        head__tolerations=[TOLERATION],
        pools__lab={**sizes, **nodes, "pod": POD},
        pools__none={**sizes, **nodes, "pod": {"runtimeClassName": "no-such-class"}},
    )
    return team


@pytest.fixture(scope="module")
def second_scheduler(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A scheduler of its own name, beside the cluster's."""
    config = tmp_path_factory.mktemp("scheduler") / "config.json"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": str(CLUSTER_HOME / "kubeconfig")},
                "leaderElection": {"leaderElect": False},
                "profiles": [{"schedulerName": NAME}],
            }
        )
    )
    program = CLUSTER_HOME / "bin/kube-scheduler"
    with (config.parent / "log").open("w") as log:
        process = subprocess.Popen(
            (program, f"--config={config}", "--secure-port=0"), stdout=log, stderr=log
        )
        yield
        process.terminate()
        process.wait()


def submit(team: Team, name: str, pool: str) -> None:
    options = ("--name", name, "--gpus", "8", "--set", f"resources.pool={pool}", "--detach")
    ended = team.trainyard("submit", "examples/digits.yaml", *options)
    assert ended.returncode == 0, ended.stderr


def worker(team: Team, run: str) -> Object:
    (found,) = [
        pod
        for pod in pods_of(team, run)
        if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"
    ]
    return found


def said_of(team: Team, run: str, words: str) -> str:
    """Wait until `explain` says something about a run, and return all that it says."""
    found: str = wait_for(
        f"explain says {words}",
        lambda: words in (said := " ".join(team.trainyard("explain", run).stdout.split())) and said,
        120,
    )
    return found


def test_pods_with_the_name_of_another_scheduler_wait_for_it(team: Team) -> None:
    submit(team, "features", "lab")
    pod = wait_for("there is a worker", lambda: len(pods_of(team, "features")) == 2, 60) and worker(
        team, "features"
    )
    assert pod["spec"]["schedulerName"] == NAME
    assert "nodeName" not in pod["spec"]


def test_a_worker_gets_the_node_that_has_all_it_asks_for(
    team: Team, second_scheduler: None
) -> None:
    assert placed(team, "features", 1).workers == ["made-up-1"]
    pod = worker(team, "features")
    events = get("events", team.namespace, "--field-selector", "reason=Scheduled")["items"]
    (event,) = [
        each for each in events if each["involvedObject"]["name"] == pod["metadata"]["name"]
    ]
    assert NAME in (event.get("reportingComponent"), event.get("source", {}).get("component"))


def test_the_api_server_has_taken_runtime_class_devices_and_volumes_of_a_restricted_pod(
    team: Team, second_scheduler: None
) -> None:
    placed(team, "features", 1)
    spec = worker(team, "features")["spec"]
    assert (spec["runtimeClassName"], spec["overhead"]) == (NAME, OVERHEAD)
    (ray,) = [each for each in spec["containers"] if each["name"] == "ray-worker"]
    for kind in ("requests", "limits"):
        assert {key: ray["resources"][kind][key] for key in (HUGE, RDMA)} == POD["resources"]
    sources = {
        volume["name"]: volume for volume in spec["volumes"] if volume["name"] in ("huge", "lustre")
    }
    assert sources["huge"]["emptyDir"] == {"medium": "HugePages"}
    assert sources["lustre"]["csi"]["driver"] == DRIVER


def test_a_worker_has_a_claim_for_the_disk_of_its_node_that_goes_with_it(
    team: Team, second_scheduler: None
) -> None:
    placed(team, "features", 1)
    name = f"{worker(team, 'features')['metadata']['name']}-nvme"
    claim = get("persistentvolumeclaims", team.namespace, f"--field-selector=metadata.name={name}")
    (found,) = claim["items"]
    assert found["spec"]["volumeName"] == f"{NAME}-made-up-1"
    free_all_nodes(team)
    wait_for(
        "the claim is gone with its pod",
        lambda: name not in kubectl("get", "pvc", "-n", team.namespace, "-o", "name"),
        60,
    )


def test_explain_names_a_device_that_no_node_has_left(team: Team, second_scheduler: None) -> None:
    free_all_nodes(team)
    for disk_name in WITH_DISK:
        kubectl("delete", "pv", f"{NAME}-{disk_name}", "--ignore-not-found")
        kubectl("apply", "-f", "-", stdin=json.dumps(disk(disk_name)))
    submit(team, "one", "lab")
    assert placed(team, "one", 1).workers == ["made-up-1"]
    submit(team, "two", "lab")
    assert RDMA in said_of(team, "two", RDMA)


def test_explain_names_a_runtime_class_that_does_not_exist(team: Team, tmp_path: Path) -> None:
    submit(team, "none", "none")
    assert "no-such-class" in said_of(team, "none", "no-such-class")
