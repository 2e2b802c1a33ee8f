"""Values that cannot work are refused with a sentence, and accepted once put right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.charts.helm_chart import RAY_APIS, refusal, render, run_helm

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
}


def messages(stderr: str) -> list[str]:
    """The chart's sentences, without what helm says around them."""
    start = stderr.index("):") + 2
    return stderr[start:].partition("\n\nUse --debug")[0].strip().splitlines()


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refused_with_this_sentence_alone(case):
    assert messages(refusal(case.values)) == [case.says]


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_accepted_once_put_right(case):
    assert render(case.put_right)


def test_missing_crds_are_refused():
    assert messages(refusal({}, apis=())) == [NO_CRDS]


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
