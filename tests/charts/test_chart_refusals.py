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
    "the cluster does not serve ray.io/v1 RayJob. Install the KubeRay operator with its CRDs first."
    " For `helm template`, which contacts no cluster, add --api-versions ray.io/v1/RayJob."
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


CHAT = {"name": "chat", "key": "url"}
KUEUE = {"system": "kueue", "name": "runs", "kueue": {"clusterQueue": "vision"}}
PRIORITIES = [{"name": "urgent", "value": 1, "description": "Deadlines."}]
DISK: dict[str, Any] = {"name": "disk", "emptyDir": {}}
MOUNT: dict[str, Any] = {"name": "disk", "mountPath": "/disk"}
SIDECAR: dict[str, Any] = {"name": "side", "image": "side:1"}
HEAD: dict[str, Any] = {"name": "ray-head"}
ON_HOST: dict[str, Any] = {"name": "disk", "hostPath": {"path": "/mnt"}}
TTY: dict[str, Any] = {"name": "side", "tty": True}
PLAIN: dict[str, Any] = {"name": "NODE", "value": "a"}
FIELD: dict[str, Any] = {"fieldRef": {"fieldPath": "spec.nodeName"}}
FROM_FIELD: dict[str, Any] = {
    "spec": {"containers": [{"name": "side", "env": [{"name": "NODE", "valueFrom": FIELD}]}]}
}
IN_A = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
ZONE = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": IN_A},
    }
}
QUOTAS = {**KUEUE, "kueue": {"clusterQueue": "vision", "nodes": {"cpu": 1}}}
PACKED: dict[str, Any] = {"topologyKey": "rack", "nodeSelector": {"machine": "m5"}}
SPOT: dict[str, Any] = {"nodeSelector": {"capacity": "spot"}}
SPOT_POOL: dict[str, Any] = {"gpusPerNode": 8, "cpus": 64, "memoryGib": 480, "spot": True}
AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"


def holds_a_credential(path: str) -> str:
    return (
        f"{path} contains a credential, which everyone with access to the Helm release could read. Put the"
        " credential into a Secret and set the name of the Secret (storage.s3.secretName, imagePullSecrets,"
        " pod.envFrom), or use a cloud role (serviceAccount.annotations)."
    )


def data_volumes(**volumes: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"volumes": volumes}}


def on_s3(endpoint: str) -> dict[str, Any]:
    return {"storage": {"claim": None, "s3": {"path": "s3://models", "endpoint": endpoint}}}


REFUSALS = {
    "ends of runs that are watched behind a NetworkPolicy": Refusal(
        values={
            "security": {"networkPolicy": {"enabled": True}},
            "elastic": {"enabled": False},
            "notify": {"watch": {"enabled": True}},
        },
        says="security.networkPolicy.enabled would block the API server for the CronJob of notify.watch. Set"
        " security.networkPolicy.apiServerCidrs (`kubectl get endpointslices -n default` shows its"
        " addresses), or set notify.watch.enabled to false.",
        put_right={"security": {"networkPolicy": {"apiServerCidrs": ["10.0.0.1/32"]}}},
    ),
    "progress behind a NetworkPolicy": Refusal(
        values={
            "security": {"networkPolicy": {"enabled": True}},
            "elastic": {"enabled": False},
            "monitoring": {"progress": {"enabled": True}},
        },
        says="security.networkPolicy.enabled would block the API server for the CronJob of"
        " monitoring.progress. Set security.networkPolicy.apiServerCidrs (`kubectl get endpointslices -n"
        " default` shows its addresses), or set monitoring.progress.enabled to false.",
        put_right={"security": {"networkPolicy": {"apiServerCidrs": ["10.0.0.1/32"]}}},
    ),
    "two receivers": Refusal(
        values={"notify": {"url": "https://hooks.example.com/", "secret": CHAT}},
        says="notify.url and notify.secret are both set, but a message has one receiver. Set notify.url to"
        ' "", or notify.secret to {}. A Secret may hold several addresses.',
        put_right={"notify": {"url": ""}},
    ),
    "image without a tag": Refusal(
        values={"image": "127.0.0.1:5000/trainyard"},
        says=(
            "image 127.0.0.1:5000/trainyard has no tag, so runs would not be reproducible. "
            "Set a fixed tag or a digest, such as 127.0.0.1:5000/trainyard:0.1.0."
        ),
        put_right={"image": "127.0.0.1:5000/trainyard@sha256:" + "a" * 64},
    ),
    "image with tag latest": Refusal(
        values={"image": "trainyard:latest"},
        says=(
            "image trainyard:latest has the tag latest, so runs would not be reproducible. "
            "Set a fixed tag or a digest."
        ),
        put_right={"image": "trainyard:0.1.0"},
    ),
    "old Ray": Refusal(
        values={"rayVersion": "2.52.1"},
        says=(
            "rayVersion 2.52.1 is below 2.53.0. For such versions the operator's health "
            "probes need programs that the image does not have. Use an image with Ray 2.53.0 "
            "or newer."
        ),
        put_right={"rayVersion": "2.53.0"},
    ),
    "attempts apart on old Kubernetes": Refusal(
        values={"job": {"separateAttempts": True}},
        kubernetes="1.30.9",
        says=(
            "job.separateAttempts is true, but Kubernetes v1.30.9 does not support "
            "mismatchLabelKeys and would also separate the workers of one attempt. Upgrade "
            "Kubernetes to 1.31 or newer, or set job.separateAttempts to false. For `helm template`, which "
            "contacts no cluster, add --kube-version."
        ),
        put_right={"job": {"separateAttempts": True}},
    ),
    "two storages": Refusal(
        values={"storage": {"s3": {"path": "s3://models"}}},
        says=(
            "storage.claim (trainyard-storage) and storage.s3.path (s3://models) are both "
            "set, but runs have one storage. Set storage.claim to null to use S3, or "
            'storage.s3.path to "" to use the claim.'
        ),
        put_right={"storage": {"claim": None, "s3": {"path": "s3://models"}}},
    ),
    "no storage": Refusal(
        values={"storage": {"claim": None}},
        says=(
            "storage.claim and storage.s3.path are both unset, but a run needs a storage that "
            "outlives its pods. Set one of them."
        ),
        put_right={"storage": {"claim": {"size": "1Gi"}}},
    ),
    "spot pool without labels of spot nodes": Refusal(
        values={"pools": {"cheap": SPOT_POOL}},
        says=(
            "pools.cheap.spot is true, but spot.nodeSelector is empty, so the pool would have no label that "
            "selects spot nodes. Set spot.nodeSelector, such as {karpenter.sh/capacity-type: spot}; "
            "values-eks.yaml, values-gke.yaml and values-aks.yaml contain it."
        ),
        put_right={"pools": {"cheap": SPOT_POOL}, "spot": SPOT},
    ),
    "spot pool with another spot label": Refusal(
        values={
            "pools": {"cheap": {**SPOT_POOL, "nodeSelector": {"capacity": "any"}}},
            "spot": SPOT,
        },
        says=(
            "pools.cheap.nodeSelector contains capacity, which spot.nodeSelector sets to spot for pools with "
            "spot: true. Remove it from the pool."
        ),
        put_right={
            "pools": {"cheap": {**SPOT_POOL, "nodeSelector": {"machine": "p5"}}},
            "spot": SPOT,
        },
    ),
    "heads on spot nodes": Refusal(
        values={"pools": {"cheap": SPOT_POOL}, "spot": SPOT, "head": SPOT},
        says=(
            "head.nodeSelector selects spot nodes, which only pools with spot: true use. Select other nodes: "
            "a run that loses its head starts again from its last checkpoint."
        ),
        put_right={"pools": {"cheap": SPOT_POOL}, "spot": SPOT},
    ),
    "spot nodes of a pool that is none": Refusal(
        values={"pools": {"cheap": SPOT_POOL, "cpu": SPOT}, "spot": SPOT},
        says=(
            "pools.cpu.nodeSelector selects spot nodes, which only pools with spot: true use. Set spot: "
            "true, or select other nodes."
        ),
        put_right={"pools": {"cheap": SPOT_POOL, "cpu": {"spot": True}}, "spot": SPOT},
    ),
    "patch that allows heads on spot nodes": Refusal(
        values={
            "pools": {"cheap": SPOT_POOL},
            "spot": SPOT,
            "head": {"pod": {"patch": {"spec": {"affinity": ZONE}}}},
        },
        says=(
            "head.pod.patch changes spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ", which trainyard sets. Remove that from the patch."
        ),
        put_right={
            "pools": {"cheap": SPOT_POOL},
            "spot": SPOT,
            "head": {"pod": {"affinity": ZONE}},
        },
    ),
    "packed workers on old Kubernetes": Refusal(
        values={"pools": {"gpu": {"topologyKey": "rack"}}},
        kubernetes="1.30.9",
        says=(
            "pools.gpu.topologyKey is set, but Kubernetes v1.30.9 does not support matchLabelKeys in "
            "affinities and would pack the workers of all runs together. Upgrade Kubernetes to 1.31 or "
            "newer, or remove topologyKey. For `helm template`, which contacts no cluster, "
            "add --kube-version."
        ),
        put_right={"pools": {"gpu": {"topologyKey": "rack"}}},
    ),
    "packed workers without topologies": Refusal(
        values={"pools": {"cpu": PACKED}, "queue": QUOTAS},
        apis=tuple(api for api in ALL_APIS if not api.endswith("/Topology")),
        says=(
            "pools.cpu.topologyKey is set, but the cluster does not serve kueue.x-k8s.io Topology. Upgrade "
            "Kueue to 0.14 or newer, or remove topologyKey. For `helm template`, which contacts no cluster, "
            "add --api-versions kueue.x-k8s.io/v1beta2/Topology."
        ),
        put_right={"pools": {"cpu": {"nodeSelector": {"machine": "m5"}}}, "queue": QUOTAS},
    ),
    "mode without a label": Refusal(
        values={"pools": {"gpu": {"topologyMode": "preferred"}}},
        says=(
            "pools.gpu.topologyMode is preferred, but the pool has no topologyKey, so there is nothing by "
            "which its workers could be packed. Set topologyKey, or remove topologyMode."
        ),
        put_right={"pools": {"gpu": {"topologyMode": "preferred", "topologyKey": "rack"}}},
    ),
    "mode without Kueue": Refusal(
        values={"pools": {"gpu": {"topologyMode": "required", "topologyKey": "rack"}}},
        says=(
            "pools.gpu.topologyMode is required, but queue.system is none: the scheduler places one pod "
            "after the other and cannot know whether all of them have room in a domain. Set queue.system to "
            "kueue, or topologyMode to preferred."
        ),
        put_right={
            "pools": {"gpu": {"topologyMode": "required", "topologyKey": "rack"}},
            "queue": KUEUE,
        },
    ),
    "elastic queue without Kueue": Refusal(
        values={"queue": {"kueue": {"elastic": True}}},
        says=(
            "queue.kueue.elastic is true, but queue.system is none. Set queue.system to kueue, or "
            "queue.kueue.elastic to false."
        ),
        put_right={"queue": {**KUEUE, "kueue": {"elastic": True}}},
    ),
    "elastic queue without elastic runs": Refusal(
        values={"queue": {**KUEUE, "kueue": {"elastic": True}}, "elastic": {"enabled": False}},
        says=(
            "queue.kueue.elastic is true, but elastic.enabled is false, so there are no elastic runs. Set "
            "elastic.enabled to true, or queue.kueue.elastic to false."
        ),
        put_right={"queue": {**KUEUE, "kueue": {"elastic": True}}},
    ),
    "packed workers on any node": Refusal(
        values={"pools": {"cpu": {"topologyKey": "rack"}}, "queue": QUOTAS},
        says=(
            "pools.cpu.topologyKey is set and its nodeSelector is empty, but Kueue needs a label of the "
            "nodes whose topology it reads. Set nodeSelector."
        ),
        put_right={"pools": {"cpu": PACKED}, "queue": QUOTAS},
    ),
    "mount path in use": Refusal(
        values={"storage": {"claim": {"mountPath": "/home/trainyard/"}}},
        says=(
            "storage.claim.mountPath /home/trainyard/ is a path that the pods use for other "
            "files. Use another path, such as /mnt/trainyard."
        ),
        put_right={"storage": {"claim": {"mountPath": "/home/trainyard/runs"}}},
    ),
    "pool with the head's name": Refusal(
        values={"pools": {"head": GPU_POOL}},
        says=(
            "pools.head has the name that KubeRay and Kueue use for the group of the head. "
            "Use another name."
        ),
        put_right={"pools": {"heads": GPU_POOL}},
    ),
    "pool without workers": Refusal(
        values={"pools": {"big": {"cpus": 8, "memoryGib": 32}}},
        says=(
            "pools.big has no number of workers per node. Set gpusPerNode (one worker per "
            "GPU), or workersPerNode for nodes without GPUs."
        ),
        put_right={"pools": {"big": {"cpus": 8, "memoryGib": 32, "workersPerNode": 4}}},
    ),
    "pool with two numbers of workers": Refusal(
        values={"pools": {"gpu": {"workersPerNode": 2}}},
        says=(
            "pools.gpu has gpusPerNode 8 and workersPerNode 2, but a pool with GPUs has one "
            "worker per GPU. Remove workersPerNode."
        ),
        put_right={"pools": {"gpu": {"workersPerNode": 0}}},
    ),
    "a pool without GPUs that have memory": Refusal(
        values={"pools": {"cpu": {"gpuMemoryGib": 80}}},
        says="pools.cpu has gpuMemoryGib, but no GPUs. Remove gpuMemoryGib.",
        put_right={"pools": {"gpu": {"gpuMemoryGib": 80}}},
    ),
    "pool that reserves more than its limit": Refusal(
        values={"pools": {"cpu": {"cpuRequest": 2.5}}},
        says=(
            "pools.cpu.cpuRequest 2.5 is above its cpus 2, but a request cannot exceed the "
            "limit. Lower cpuRequest or raise cpus."
        ),
        put_right={"pools": {"cpu": {"cpuRequest": 2}}},
    ),
    "head that reserves more than its limit": Refusal(
        values={"head": {"cpuRequest": 3}},
        says=(
            "head.cpuRequest 3 is above head.cpus 2, but a request cannot exceed the limit. "
            "Lower cpuRequest or raise cpus."
        ),
        put_right={"head": {"cpuRequest": 3, "cpus": 3}},
    ),
    "default GPU pool that does not exist": Refusal(
        values={"defaultPools": {"gpus": "a100"}},
        says="defaultPools.gpus a100 is not a pool. Use one of the pools: cpu, gpu.",
        put_right={"defaultPools": {"gpus": "a100"}, "pools": {"a100": GPU_POOL}},
    ),
    "default GPU pool without GPUs": Refusal(
        values={"defaultPools": {"gpus": "cpu"}},
        says="defaultPools.gpus cpu is a pool without GPUs. Use a pool with gpusPerNode.",
        put_right={"defaultPools": {"gpus": "gpu"}},
    ),
    "default worker pool that does not exist": Refusal(
        values={"defaultPools": {"workers": "small"}},
        says="defaultPools.workers small is not a pool. Use one of the pools: cpu, gpu.",
        put_right={"defaultPools": {"workers": "cpu"}},
    ),
    "default worker pool with GPUs": Refusal(
        values={"defaultPools": {"workers": "gpu"}},
        says="defaultPools.workers gpu is a pool with GPUs. Use a pool with workersPerNode.",
        put_right={"defaultPools": {"workers": "cpu"}},
    ),
    "standing cluster on a pool that does not exist": Refusal(
        values={"rayCluster": {"enabled": True, "pool": "small"}},
        says="rayCluster.pool small is not a pool. Use one of the pools: cpu, gpu.",
        put_right={"rayCluster": {"enabled": True, "pool": "gpu"}},
    ),
    "standing cluster that gives nodes back without an autoscaler": Refusal(
        values={"rayCluster": {"enabled": True, "idleMinutes": 15}, "elastic": {"enabled": False}},
        says=(
            "rayCluster.idleMinutes needs Ray's autoscaler, which elastic.enabled = false forbids. Set "
            "elastic.enabled to true, or rayCluster.idleMinutes to 0."
        ),
        put_right={"elastic": {"enabled": True}},
    ),
    "pool with RDMA and no resource": Refusal(
        values={"pools": {"gpu": {"network": {"preset": "roce"}}}},
        says=(
            "pools.gpu.network.preset roce needs resource, the resource name of the nodes' "
            "devices. Set it, for example to rdma/hca_shared_devices_a."
        ),
        put_right={"pools": {"gpu": {"network": {"preset": "roce", "resource": "rdma/hca"}}}},
    ),
    "pool with devices for TCP": Refusal(
        values={"pools": {"gpu": {"network": {"preset": "tcp", "devicesPerNode": 2}}}},
        says=(
            "pools.gpu.network.preset tcp uses no devices. Remove resource and "
            "devicesPerNode, or use infiniband, roce or efa."
        ),
        put_right={"pools": {"gpu": {"network": {"preset": "efa", "devicesPerNode": 2}}}},
    ),
    "image pulled ahead to a pool that does not exist": Refusal(
        values={"prePull": {"enabled": True, "pools": ["a100"]}},
        says=("prePull.pools contains a100, which is not a pool. Use one of the pools: cpu, gpu."),
        put_right={"prePull": {"enabled": True, "pools": ["gpu"]}},
    ),
    "queue of no system": Refusal(
        values={"queue": {"name": "runs"}},
        says=(
            "queue.name runs is set, but queue.system is none, so no run would use the queue. "
            'Set queue.system, or set queue.name to "".'
        ),
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
        says=(
            "queue.kueue.clusterQueue vision is set without queue.name: its LocalQueue needs "
            "a name. Set queue.name, for example to runs."
        ),
        put_right={"queue": KUEUE},
    ),
    "Kueue's objects without Kueue": Refusal(
        values={"queue": KUEUE},
        apis=RAY_APIS,
        says=(
            "queue.kueue.clusterQueue is set, but the cluster does not serve kueue.x-k8s.io "
            'LocalQueue. Install Kueue first, or set queue.kueue.clusterQueue to "". For '
            "`helm template`, which contacts no cluster, add --api-versions "
            "kueue.x-k8s.io/v1beta2/LocalQueue."
        ),
        put_right={"queue": KUEUE | {"kueue": {"clusterQueue": ""}}},
    ),
    "nodes for no ClusterQueue": Refusal(
        values={"queue": {"kueue": {"nodes": {"gpu": 4}}}},
        says=(
            "queue.kueue.nodes is set without queue.kueue.clusterQueue: there is no "
            "ClusterQueue for these quotas. Set queue.kueue.clusterQueue, or set "
            "queue.kueue.nodes to {}."
        ),
        put_right={"queue": KUEUE | {"kueue": {"clusterQueue": "vision", "nodes": {"gpu": 4}}}},
    ),
    "a cohort for no ClusterQueue": Refusal(
        values={"queue": KUEUE | {"kueue": {"clusterQueue": "vision", "cohort": "all"}}},
        says=(
            "queue.kueue.cohort all is set without queue.kueue.nodes: the ClusterQueue is created by "
            'others. Set queue.kueue.nodes, or set queue.kueue.cohort to "".'
        ),
        put_right={"queue": KUEUE | {"kueue": {"clusterQueue": "vision"}}},
    ),
    "nodes of a pool that does not exist": Refusal(
        values={"queue": KUEUE | {"kueue": {"clusterQueue": "vision", "nodes": {"a100": 4}}}},
        says=(
            "queue.kueue.nodes contains a100, which is not a pool. Use one of the pools: cpu, gpu."
        ),
        put_right={
            "queue": KUEUE | {"kueue": {"clusterQueue": "vision", "nodes": {"a100": 4}}},
            "pools": {"a100": GPU_POOL},
        },
    ),
    "priorities that nobody can name": Refusal(
        values={"priorityClasses": PRIORITIES},
        says=(
            "priorityClasses are set, but with queue.system none a run file cannot set a "
            "priority. Use kueue or volcano, or set priorityClasses to []."
        ),
        put_right={"priorityClasses": PRIORITIES, "queue": {"system": "volcano"}},
    ),
    "Kueue's priorities without Kueue": Refusal(
        values={"priorityClasses": PRIORITIES, "queue": {"system": "kueue"}},
        apis=RAY_APIS,
        says=(
            "priorityClasses are set, but the cluster does not serve kueue.x-k8s.io "
            "WorkloadPriorityClass. Install Kueue first, or set priorityClasses to []. For "
            "`helm template`, which contacts no cluster, add --api-versions "
            "kueue.x-k8s.io/v1beta2/WorkloadPriorityClass."
        ),
        put_right={"priorityClasses": [], "queue": {"system": "kueue"}},
    ),
    "PodMonitor without the Prometheus operator": Refusal(
        values={"monitoring": {"podMonitor": {"enabled": True}}},
        apis=RAY_APIS,
        says=(
            "monitoring.podMonitor.enabled is true, but the cluster does not serve "
            "monitoring.coreos.com/v1 PodMonitor. Install the Prometheus operator first, or "
            "set it to false. For `helm template`, which contacts no cluster, add "
            "--api-versions monitoring.coreos.com/v1/PodMonitor."
        ),
        put_right={"monitoring": {"dashboards": {"enabled": True}}},
    ),
    "PrometheusRule without the Prometheus operator": Refusal(
        values={"monitoring": {"prometheusRule": {"enabled": True}}},
        apis=RAY_APIS,
        says=(
            "monitoring.prometheusRule.enabled is true, but the cluster does not serve "
            "monitoring.coreos.com/v1 PrometheusRule. Install the Prometheus operator first, "
            "or set it to false. For `helm template`, which contacts no cluster, add "
            "--api-versions monitoring.coreos.com/v1/PrometheusRule."
        ),
        put_right={"monitoring": {"prometheusRule": {"enabled": False}}},
    ),
    "policy that cuts the autoscaler off": Refusal(
        values={"security": {"networkPolicy": {"enabled": True}}},
        says=(
            "security.networkPolicy.enabled would block the API server for the autoscaler of "
            "elastic runs. Set security.networkPolicy.apiServerCidrs (`kubectl get "
            "endpointslices -n default` shows its addresses), or set elastic.enabled to "
            "false."
        ),
        put_right={"security": {"networkPolicy": {"enabled": True}}, "elastic": {"enabled": False}},
    ),
    "policy for everybody": Refusal(
        values={"security": {"networkPolicy": {"egress": [{"ports": [443]}]}}},
        says=(
            "security.networkPolicy.egress.0 has neither cidrs nor namespaces, which would "
            "allow all peers. Set one of them; the CIDR 0.0.0.0/0 allows all addresses."
        ),
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
    "variable of Ray": Refusal(
        values={"head": {"pod": {"env": {"RAY_memory_usage_threshold": "0.9"}}}},
        says=(
            "head.pod.env contains RAY_memory_usage_threshold, a variable of trainyard or Ray. Use "
            "another name. Variables of Ray that the chart does not set can be set by head.pod.patch."
        ),
        put_right={"head": {"pod": {"env": {"WANDB_MODE": "offline"}}}},
    ),
    "label of Ray": Refusal(
        values={"pod": {"labels": {"ray.io/cluster": "mine"}}},
        says=(
            "pod.labels contains ray.io/cluster, a key of trainyard, Ray, a queue or Helm. "
            "Use another key."
        ),
        put_right={"pod": {"labels": {"example.com/cluster": "mine"}}},
    ),
    "volume with a name in use": Refusal(
        values={"pod": {"volumes": [{"name": "storage", "emptyDir": {}}]}},
        says=(
            "pod.volumes contains storage, the name of a volume of trainyard or KubeRay. "
            "Use another name."
        ),
        put_right={"pod": {"volumes": [DISK]}},
    ),
    "data volume with two sources": Refusal(
        values=data_volumes(imagenet={"claim": "a", "csi": {}, "mountPath": "/data"}),
        says=(
            "data.volumes.imagenet has 2 sources (claim, csi), but a volume has one. Set claim, or one "
            "volume source of Kubernetes such as csi."
        ),
        put_right=data_volumes(imagenet={"csi": {"driver": "a"}, "mountPath": "/data"}),
    ),
    "data volume over the storage": Refusal(
        values=data_volumes(imagenet={"claim": "a", "mountPath": "/mnt/trainyard/"}),
        says=(
            "data.volumes.imagenet.mountPath is /mnt/trainyard, the path of storage.claim. "
            "Use another path."
        ),
        put_right=data_volumes(imagenet={"claim": "a", "mountPath": "/mnt/imagenet"}),
    ),
    "two data volumes at one path": Refusal(
        values=data_volumes(
            a={"claim": "a", "mountPath": "/data"}, b={"claim": "b", "mountPath": "/data/"}
        ),
        says="data.volumes.b.mountPath is /data, the path of data.volumes.a. Use another path.",
        put_right=data_volumes(
            a={"claim": "a", "mountPath": "/data"}, b={"claim": "b", "mountPath": "/more"}
        ),
    ),
    "volume with the name of a data volume": Refusal(
        values=data_volumes(disk={"claim": "a", "mountPath": "/data"})
        | {"pod": {"volumes": [DISK | {"name": "data-disk"}]}},
        says=(
            "pod.volumes contains data-disk, the name of a volume of trainyard or KubeRay. "
            "Use another name."
        ),
        put_right=data_volumes(disk={"claim": "a", "mountPath": "/data"})
        | {"pod": {"volumes": [DISK]}},
    ),
    "volume twice": Refusal(
        values={"pod": {"volumes": [DISK]}, "head": {"pod": {"volumes": [DISK]}}},
        says=(
            "head.pod.volumes contains disk twice, together with pod.volumes. "
            "Give each volume its own name."
        ),
        put_right={
            "pod": {"volumes": [DISK]},
            "head": {"pod": {"volumes": [DISK | {"name": "b"}]}},
        },
    ),
    "mount of a volume that does not exist": Refusal(
        values={"pod": {"volumeMounts": [MOUNT]}},
        says=(
            "pod.volumeMounts mounts disk, which is not a volume of the pod. Add it to pod.volumes."
        ),
        put_right={"pod": {"volumes": [DISK], "volumeMounts": [MOUNT]}},
    ),
    "mount over another volume": Refusal(
        values={"pod": {"volumes": [DISK], "volumeMounts": [MOUNT | {"mountPath": "/tmp/"}]}},
        says=(
            "pod.volumeMounts mounts disk at /tmp, a path that the pods use for other files. "
            "Use another path."
        ),
        put_right={"pod": {"volumes": [DISK], "volumeMounts": [MOUNT | {"mountPath": "/tmp/a"}]}},
    ),
    "two mounts at one path": Refusal(
        values={"pod": {"volumes": [DISK], "volumeMounts": [MOUNT, MOUNT]}},
        says=(
            "pod.volumeMounts has two mounts at /disk, together with pod.volumeMounts. "
            "Use another path."
        ),
        put_right={"pod": {"volumes": [DISK], "volumeMounts": [MOUNT]}},
    ),
    "container with a name in use": Refusal(
        values={"pod": {"sidecars": [SIDECAR | {"name": "ray-head"}]}},
        says=(
            "pod.sidecars contains ray-head, the name of a container of trainyard or KubeRay. "
            "Use another name."
        ),
        put_right={"pod": {"sidecars": [SIDECAR]}},
    ),
    "container twice": Refusal(
        values={"pod": {"initContainers": [SIDECAR], "sidecars": [SIDECAR]}},
        says=(
            "pod.sidecars contains side, the name of another container of the pod. "
            "Give each container its own name."
        ),
        put_right={"pod": {"initContainers": [SIDECAR], "sidecars": [SIDECAR | {"name": "b"}]}},
    ),
    "resource that follows from the pool": Refusal(
        values={"pools": {"gpu": {"pod": {"resources": {"nvidia.com/gpu": "8"}}}}},
        says=(
            "pools.gpu.pod.resources contains nvidia.com/gpu, which follows from the keys of the "
            "head and of pools: cpus, memoryGib, ephemeralStorageGib, gpusPerNode, network. "
            "Set it there."
        ),
        put_right={"pools": {"gpu": {"pod": {"resources": {"rdma/hca": "8"}}}}},
    ),
    "scheduler of a queue": Refusal(
        values={"pod": {"schedulerName": "packing"}, "queue": {"system": "kai", "name": "a"}},
        says=(
            "pod.schedulerName is packing, but with queue.system kai the operator sets the "
            'scheduler of Ray pods. Set pod.schedulerName to "".'
        ),
        put_right={"pod": {"schedulerName": ""}, "queue": {"system": "kai", "name": "a"}},
    ),
    "terms of which one is enough": Refusal(
        values={"pod": {"affinity": ZONE}, "head": {"pod": {"affinity": ZONE}}},
        says=(
            "head.pod.affinity and pod.affinity both contain nodeSelectorTerms. Kubernetes requires "
            "only one of all terms, so the second list would not restrict the first. Set them in "
            "one place, or use nodeSelector."
        ),
        put_right={"pod": {"affinity": ZONE}, "head": {"nodeSelector": {"zone": "a"}}},
    ),
    "patch with a new container": Refusal(
        values={"pools": {"cpu": {"pod": {"patch": {"spec": {"containers": [SIDECAR]}}}}}},
        says=(
            "pools.cpu.pod.patch.spec.containers contains a container that the pod does not have. "
            "Its containers are ray-worker. Add others with initContainers or sidecars."
        ),
        put_right={"pools": {"cpu": {"pod": {"sidecars": [SIDECAR]}}}},
    ),
    "patch of the Ray container's command": Refusal(
        values={"head": {"pod": {"patch": {"spec": {"containers": [HEAD | {"args": ["a"]}]}}}}},
        says=(
            "head.pod.patch changes spec.containers[0].args, which trainyard sets. "
            "Remove that from the patch."
        ),
        put_right={"head": {"pod": {"patch": {"spec": {"containers": [HEAD | {"tty": True}]}}}}},
    ),
    "patch that gives a volume a second source": Refusal(
        values={
            "pod": {"volumes": [DISK]},
            "head": {"pod": {"patch": {"spec": {"volumes": [ON_HOST]}}}},
        },
        says=(
            "head.pod.patch gives spec.volumes.disk both emptyDir and hostPath, of which Kubernetes permits "
            "only one. Delete the other one with null in the patch."
        ),
        put_right={
            "pod": {"volumes": [DISK]},
            "head": {"pod": {"patch": {"spec": {"volumes": [{**ON_HOST, "emptyDir": None}]}}}},
        },
    ),
    "two patches that give a volume two sources": Refusal(
        values={
            "pod": {"patch": {"spec": {"volumes": [DISK]}}},
            "pools": {"cpu": {"pod": {"patch": {"spec": {"volumes": [ON_HOST]}}}}},
        },
        says=(
            "pod.patch and pools.cpu.pod.patch together give spec.volumes.disk both emptyDir and hostPath, "
            "of which Kubernetes permits only one. Delete the other one with null in pools.cpu.pod.patch."
        ),
        put_right={
            "pod": {"patch": {"spec": {"volumes": [DISK]}}},
            "pools": {
                "cpu": {"pod": {"patch": {"spec": {"volumes": [{**ON_HOST, "emptyDir": None}]}}}}
            },
        },
    ),
    "two patches that give a variable two sources": Refusal(
        values={
            "pod": {"patch": {"spec": {"containers": [{"name": "side", "env": [PLAIN]}]}}},
            "head": {"pod": {"sidecars": [SIDECAR], "patch": FROM_FIELD}},
            "pools": {name: {"pod": {"sidecars": [SIDECAR]}} for name in ("cpu", "gpu")},
        },
        says=(
            "pod.patch and head.pod.patch together give spec.containers.side.env.NODE both value and "
            "valueFrom, of which Kubernetes permits only one. Delete the other one with null in "
            "head.pod.patch."
        ),
        put_right={
            "head": {"pod": {"sidecars": [SIDECAR], "patch": FROM_FIELD}},
        },
    ),
    "patch of a container that another patch removes": Refusal(
        values={
            "pod": {"patch": {"spec": {"initContainers": None}}},
            "head": {
                "pod": {"initContainers": [SIDECAR], "patch": {"spec": {"initContainers": [TTY]}}}
            },
        },
        says=(
            "head.pod.patch.spec.initContainers contains side, which pod.patch removes. Remove it from one "
            "of the two patches."
        ),
        put_right={
            "head": {
                "pod": {"initContainers": [SIDECAR], "patch": {"spec": {"initContainers": [TTY]}}}
            },
        },
    ),
    "patch of a variable": Refusal(
        values={
            "head": {
                "pod": {
                    "patch": {
                        "spec": {
                            "containers": [
                                HEAD | {"env": [{"name": "TRAINYARD_LOG", "value": "/log"}]}
                            ]
                        }
                    }
                }
            }
        },
        says=(
            "head.pod.patch changes spec.containers[0].env.TRAINYARD_LOG, which trainyard sets. "
            "Remove that from the patch."
        ),
        put_right={"head": {"pod": {"patch": {"spec": {"containers": [HEAD]}}}}},
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
    files = ("_requirements.tpl", "_pod_requirements.tpl", "_placement.tpl")
    text = "".join((CHART / "templates" / file).read_text() for file in files)
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
    assert starts == ["the", "image", "storage.claim", "defaultPools.workers", "head.cpuRequest"]
