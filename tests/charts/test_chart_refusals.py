"""Values that cannot work are refused with a sentence, and accepted once put right."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.charts.helm_chart import ALL_APIS, CHART, KUBERNETES, RAY_APIS, refusal, render, run_helm

GPU_POOL = {"gpusPerNode": 8, "cpus": 64, "memoryGib": 480}
NO_CRDS = (
    "the cluster does not know ray.io/v1 RayJob. Install the KubeRay operator with its CRDs first"
    " (`helm template` asks no cluster: give it --api-versions ray.io/v1/RayJob)."
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    values: dict[str, Any]
    says: str
    put_right: dict[str, Any]
    apis: Iterable[str] = ALL_APIS
    """What the cluster serves; where that is the problem, `put_right` needs no more."""
    kubernetes: str = KUBERNETES
    """Its version; where that is the problem, `put_right` keeps the values."""


KUEUE = {"system": "kueue", "name": "runs", "kueue": {"clusterQueue": "vision"}}
PRIORITIES = [{"name": "urgent", "value": 1, "description": "Deadlines."}]
AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"


def holds_a_credential(path: str) -> str:
    return (
        f"{path} holds a credential, which everybody who reads the release could read. Put it into a"
        " Secret, and its name here (storage.s3.secretName, imagePullSecrets), or use a cloud role"
        " (serviceAccount.annotations)."
    )


def on_s3(endpoint: str) -> dict[str, Any]:
    return {"storage": {"claim": None, "s3": {"path": "s3://models", "endpoint": endpoint}}}


REFUSALS = {
    "image without a tag": Refusal(
        values={"image": "127.0.0.1:5000/trainyard"},
        says="image 127.0.0.1:5000/trainyard has no tag: a run must be repeatable. Give a"
        " fixed tag or a digest, such as 127.0.0.1:5000/trainyard:0.1.0.",
        put_right={"image": "127.0.0.1:5000/trainyard@sha256:" + "a" * 64},
    ),
    "image with tag latest": Refusal(
        values={"image": "trainyard:latest"},
        says="image trainyard:latest changes under a run: a run must be repeatable. Give a"
        " fixed tag or a digest.",
        put_right={"image": "trainyard:0.1.0"},
    ),
    "old Ray": Refusal(
        values={"rayVersion": "2.52.1"},
        says="rayVersion 2.52.1 is too old: below 2.53.0 the operator probes pods with"
        " programs that the image lacks. Use an image with Ray 2.53.0 or newer.",
        put_right={"rayVersion": "2.53.0"},
    ),
    "attempts apart on old Kubernetes": Refusal(
        values={"job": {"separateAttempts": True}},
        kubernetes="1.30.9",
        says="job.separateAttempts is true, but Kubernetes v1.30.9 does not know mismatchLabelKeys, and"
        " would keep the workers of one attempt from each other. Upgrade it to 1.31 or newer, or set it"
        " to false.",
        put_right={"job": {"separateAttempts": True}},
    ),
    "two storages": Refusal(
        values={"storage": {"s3": {"path": "s3://models"}}},
        says="storage.claim (trainyard-storage) and storage.s3.path (s3://models) are both"
        " set: runs have one storage. Set storage.claim to null to use S3, or"
        ' storage.s3.path to "" to use the claim.',
        put_right={"storage": {"claim": None, "s3": {"path": "s3://models"}}},
    ),
    "no storage": Refusal(
        values={"storage": {"claim": None}},
        says="neither storage.claim nor storage.s3.path is set: a run needs a storage that"
        " outlives its pods. Set one of them.",
        put_right={"storage": {"claim": {"size": "1Gi"}}},
    ),
    "mount path in use": Refusal(
        values={"storage": {"claim": {"mountPath": "/home/trainyard/"}}},
        says="storage.claim.mountPath /home/trainyard/ is taken by the pods themselves. Use a"
        " folder of its own, such as /mnt/trainyard.",
        put_right={"storage": {"claim": {"mountPath": "/home/trainyard/runs"}}},
    ),
    "pool with the head's name": Refusal(
        values={"pools": {"head": GPU_POOL}},
        says="pools.head has the name that KubeRay and Kueue give to the head's group. Use"
        " another name.",
        put_right={"pools": {"heads": GPU_POOL}},
    ),
    "pool without workers": Refusal(
        values={"pools": {"big": {"cpus": 8, "memoryGib": 32}}},
        says="pools.big does not say how many workers a node holds. Set gpusPerNode (one"
        " worker per GPU), or workersPerNode for nodes without GPUs.",
        put_right={"pools": {"big": {"cpus": 8, "memoryGib": 32, "workersPerNode": 4}}},
    ),
    "pool with two numbers of workers": Refusal(
        values={"pools": {"gpu": {"workersPerNode": 2}}},
        says="pools.gpu has gpusPerNode 8 and workersPerNode 2: a pool with GPUs has one"
        " worker per GPU. Remove workersPerNode.",
        put_right={"pools": {"gpu": {"workersPerNode": 0}}},
    ),
    "pool that reserves more than its limit": Refusal(
        values={"pools": {"cpu": {"cpuRequest": 2.5}}},
        says="pools.cpu.cpuRequest 2.5 is above its cpus 2: a pod cannot reserve more than its"
        " limit. Lower cpuRequest or raise cpus.",
        put_right={"pools": {"cpu": {"cpuRequest": 2}}},
    ),
    "head that reserves more than its limit": Refusal(
        values={"head": {"cpuRequest": 3}},
        says="head.cpuRequest 3 is above head.cpus 2: a pod cannot reserve more than its"
        " limit. Lower cpuRequest or raise cpus.",
        put_right={"head": {"cpuRequest": 3, "cpus": 3}},
    ),
    "default GPU pool that does not exist": Refusal(
        values={"defaultPools": {"gpus": "a100"}},
        says="defaultPools.gpus a100 is not a pool. There are: cpu, gpu.",
        put_right={"defaultPools": {"gpus": "a100"}, "pools": {"a100": GPU_POOL}},
    ),
    "default GPU pool without GPUs": Refusal(
        values={"defaultPools": {"gpus": "cpu"}},
        says="defaultPools.gpus cpu is a pool without GPUs. Name one with gpusPerNode.",
        put_right={"defaultPools": {"gpus": "gpu"}},
    ),
    "default worker pool that does not exist": Refusal(
        values={"defaultPools": {"workers": "small"}},
        says="defaultPools.workers small is not a pool. There are: cpu, gpu.",
        put_right={"defaultPools": {"workers": "cpu"}},
    ),
    "default worker pool with GPUs": Refusal(
        values={"defaultPools": {"workers": "gpu"}},
        says="defaultPools.workers gpu is a pool with GPUs. Name one with workersPerNode.",
        put_right={"defaultPools": {"workers": "cpu"}},
    ),
    "standing cluster on a pool that does not exist": Refusal(
        values={"rayCluster": {"enabled": True, "pool": "small"}},
        says="rayCluster.pool small is not a pool. There are: cpu, gpu.",
        put_right={"rayCluster": {"enabled": True, "pool": "gpu"}},
    ),
    "pool with RDMA and no resource": Refusal(
        values={"pools": {"gpu": {"network": {"preset": "roce"}}}},
        says="pools.gpu.network.preset roce needs resource: the name under which nodes offer their"
        " devices, such as rdma/hca_shared_devices_a.",
        put_right={"pools": {"gpu": {"network": {"preset": "roce", "resource": "rdma/hca"}}}},
    ),
    "pool with devices for TCP": Refusal(
        values={"pools": {"gpu": {"network": {"preset": "tcp", "devicesPerNode": 2}}}},
        says="pools.gpu.network.preset tcp takes no devices. Remove resource and devicesPerNode, or"
        " use infiniband, roce or efa.",
        put_right={"pools": {"gpu": {"network": {"preset": "efa", "devicesPerNode": 2}}}},
    ),
    "image pulled ahead to a pool that does not exist": Refusal(
        values={"prePull": {"enabled": True, "pools": ["a100"]}},
        says="prePull.pools names a100, which is not a pool. There are: cpu, gpu.",
        put_right={"prePull": {"enabled": True, "pools": ["gpu"]}},
    ),
    "queue of no system": Refusal(
        values={"queue": {"name": "runs"}},
        says="queue.name runs is set, but queue.system is none: no run would queue there. Name the"
        ' system, or set queue.name to "".',
        put_right={"queue": {"name": "runs", "system": "yunikorn"}},
    ),
    "ClusterQueue of another system": Refusal(
        values={"queue": KUEUE | {"system": "volcano"}},
        says="queue.kueue.clusterQueue vision is set, but queue.system is volcano. Set queue.system to"
        ' kueue, or queue.kueue.clusterQueue to "".',
        put_right={"queue": KUEUE},
    ),
    "ClusterQueue without a queue's name": Refusal(
        values={"queue": KUEUE | {"name": ""}},
        says="queue.kueue.clusterQueue vision is set without queue.name: the LocalQueue that leads to"
        " it needs a name. Set queue.name, for instance to runs.",
        put_right={"queue": KUEUE},
    ),
    "Kueue's objects without Kueue": Refusal(
        values={"queue": KUEUE},
        apis=RAY_APIS,
        says="queue.kueue.clusterQueue is set, but the cluster does not know kueue.x-k8s.io"
        ' LocalQueue. Install Kueue first, or set queue.kueue.clusterQueue to "" (`helm template`'
        " asks no cluster: give it --api-versions kueue.x-k8s.io/v1beta2/LocalQueue).",
        put_right={"queue": KUEUE | {"kueue": {"clusterQueue": ""}}},
    ),
    "nodes for no ClusterQueue": Refusal(
        values={"queue": {"kueue": {"nodes": {"gpu": 4}}}},
        says="queue.kueue.nodes is set without queue.kueue.clusterQueue: there is no ClusterQueue to"
        " fill. Name one, or set queue.kueue.nodes to {}.",
        put_right={"queue": KUEUE | {"kueue": {"clusterQueue": "vision", "nodes": {"gpu": 4}}}},
    ),
    "nodes of a pool that does not exist": Refusal(
        values={"queue": KUEUE | {"kueue": {"clusterQueue": "vision", "nodes": {"a100": 4}}}},
        says="queue.kueue.nodes counts a100, which is not a pool. There are: cpu, gpu.",
        put_right={
            "queue": KUEUE | {"kueue": {"clusterQueue": "vision", "nodes": {"a100": 4}}},
            "pools": {"a100": GPU_POOL},
        },
    ),
    "priorities that nobody can name": Refusal(
        values={"priorityClasses": PRIORITIES},
        says="priorityClasses are given, but with queue.system none no run can name one. Use kueue or"
        " volcano, or set priorityClasses to [].",
        put_right={"priorityClasses": PRIORITIES, "queue": {"system": "volcano"}},
    ),
    "Kueue's priorities without Kueue": Refusal(
        values={"priorityClasses": PRIORITIES, "queue": {"system": "kueue"}},
        apis=RAY_APIS,
        says="priorityClasses are given, but the cluster does not know kueue.x-k8s.io"
        " WorkloadPriorityClass. Install Kueue first, or set priorityClasses to [] (`helm template`"
        " asks no cluster: give it --api-versions kueue.x-k8s.io/v1beta2/WorkloadPriorityClass).",
        put_right={"priorityClasses": [], "queue": {"system": "kueue"}},
    ),
    "PodMonitor without the Prometheus operator": Refusal(
        values={"monitoring": {"podMonitor": {"enabled": True}}},
        apis=RAY_APIS,
        says="monitoring.podMonitor.enabled is true, but the cluster does not know"
        " monitoring.coreos.com/v1 PodMonitor. Install the Prometheus operator first, or set it to"
        " false (`helm template` asks no cluster: give it --api-versions"
        " monitoring.coreos.com/v1/PodMonitor).",
        put_right={"monitoring": {"dashboards": {"enabled": True}}},
    ),
    "PrometheusRule without the Prometheus operator": Refusal(
        values={"monitoring": {"prometheusRule": {"enabled": True}}},
        apis=RAY_APIS,
        says="monitoring.prometheusRule.enabled is true, but the cluster does not know"
        " monitoring.coreos.com/v1 PrometheusRule. Install the Prometheus operator first, or set it to"
        " false (`helm template` asks no cluster: give it --api-versions"
        " monitoring.coreos.com/v1/PrometheusRule).",
        put_right={"monitoring": {"prometheusRule": {"enabled": False}}},
    ),
    "policy that cuts the autoscaler off": Refusal(
        values={"security": {"networkPolicy": {"enabled": True}}},
        says="security.networkPolicy.enabled would cut the autoscaler of elastic runs off the API"
        " server. Give security.networkPolicy.apiServerCidrs (`kubectl get endpointslices -n default`"
        " shows its addresses), or set elastic.enabled to false.",
        put_right={"security": {"networkPolicy": {"enabled": True}}, "elastic": {"enabled": False}},
    ),
    "policy for everybody": Refusal(
        values={"security": {"networkPolicy": {"egress": [{"ports": [443]}]}}},
        says="security.networkPolicy.egress.0 names nobody, which would mean everybody. Give it cidrs"
        " or namespaces; 0.0.0.0/0 is everybody.",
        put_right={"security": {"networkPolicy": {"egress": [{"cidrs": ["0.0.0.0/0"]}]}}},
    ),
    "password in an address": Refusal(
        values=on_s3("https://trainer:hunter2@minio:9000"),
        says=holds_a_credential("storage.s3.endpoint"),
        put_right=on_s3("https://minio:9000"),
    ),
    "AWS access key": Refusal(
        values={"serviceAccount": {"annotations": {"note": f"key {AWS_KEY}"}}},
        says=holds_a_credential("serviceAccount.annotations.note"),
        put_right={"serviceAccount": {"annotations": {"note": "key AKIA of ours"}}},
    ),
    "value that is called a password": Refusal(
        values={"serviceAccount": {"annotations": {"registry-password": "hunter2"}}},
        says=holds_a_credential("serviceAccount.annotations.registry-password"),
        put_right={"serviceAccount": {"annotations": {"registry-password-secret": "registry"}}},
    ),
    "private key in a list": Refusal(
        values={
            "priorityClasses": [PRIORITIES[0] | {"description": "-----BEGIN RSA PRIVATE KEY-----"}],
            "queue": {"system": "volcano"},
        },
        says=holds_a_credential("priorityClasses.0.description"),
        put_right={"priorityClasses": PRIORITIES, "queue": {"system": "volcano"}},
    ),
}


def messages(stderr: str) -> list[str]:
    """The chart's sentences, without what helm says around them."""
    start = stderr.index("):") + 2
    return stderr[start:].partition("\n\nUse --debug")[0].strip().splitlines()


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refused_with_this_sentence_alone(case):
    assert messages(refusal(case.values, case.apis, case.kubernetes)) == [case.says]


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_accepted_once_put_right(case):
    assert render(case.put_right, case.apis)


def test_missing_crds_are_refused():
    assert messages(refusal({}, apis=())) == [NO_CRDS]


def test_a_refused_credential_is_not_repeated():
    said = refusal(on_s3("https://trainer:hunter2@minio:9000"))
    assert "hunter2" not in said


def test_every_refusal_of_the_chart_has_its_test():
    text = (CHART / "templates" / "_requirements.tpl").read_text()
    sentences = re.findall(r'append \$problems (?:\(printf )?"((?:[^"\\]|\\.)*)"', text)
    assert len(sentences) == text.count("append $problems")
    tested = [NO_CRDS, *(case.says for case in REFUSALS.values())]
    for sentence in sentences:
        pattern = re.sub(r"%[a-z]", ".+", re.escape(sentence.replace('\\"', '"')))
        assert any(re.fullmatch(pattern, says) for says in tested), sentence


def test_crds_are_enough():
    assert run_helm({}, apis=RAY_APIS[:1]).returncode == 0


def test_all_problems_are_named_at_once():
    values = {
        "image": "trainyard",
        "storage": {"claim": None},
        "pools": {"cpu": None},
        "head": {"cpuRequest": 9},
    }
    starts = [message.split()[0] for message in messages(refusal(values, apis=()))]
    assert starts == ["the", "image", "neither", "defaultPools.workers", "head.cpuRequest"]
