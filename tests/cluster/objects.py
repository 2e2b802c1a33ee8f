"""Kubernetes objects that the cluster starts with: the shared storage class and its volumes. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from layout import Home
from parts import MADE_UP, NODE_ADDRESS

STORAGE_CLASS = "trainyard-shared"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
VOLUMES = 40
VOLUME_SIZE = "100Gi"
"""What a claim may ask for. Nobody enforces it: the machine's disk is the limit."""

Object = dict[str, object]


def storage(home: Home) -> Object:
    """A class whose volumes are folders of the machine, which all pods of the one node can share."""
    storage_class: Object = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS, "annotations": {DEFAULT_CLASS: "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "reclaimPolicy": "Retain",
        "volumeBindingMode": "Immediate",
    }
    volumes = [_volume(folder) for folder in volume_folders(home)]
    return {"apiVersion": "v1", "kind": "List", "items": [storage_class, *volumes]}


def volume_folders(home: Home) -> list[Path]:
    return [home.volumes / f"shared-{number}" for number in range(1, VOLUMES + 1)]


def released(volumes: Iterable[dict[str, dict[str, str]]]) -> list[str]:
    """Names of our volumes whose claim is gone: nobody else gets them before that claim is forgotten."""
    return [
        volume["metadata"]["name"]
        for volume in volumes
        if volume["spec"]["storageClassName"] == STORAGE_CLASS
        and volume["status"]["phase"] in ("Released", "Failed")
    ]


def gpu_patch(count: int) -> Object:
    """A merge patch of a node's status: it claims GPUs that nobody has to own."""
    amount = {"nvidia.com/gpu": str(count) if count else None}
    return {"status": {"capacity": amount, "allocatable": amount}}


def endpoints(
    namespace: str, name: str, ports: Mapping[str, int], labels: Mapping[str, str]
) -> Object:
    """The ports of a process of this machine, for a service that has no selector."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {**labels, "kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
        "ports": [
            {"name": port_name, "port": port, "protocol": "TCP"}
            for port_name, port in ports.items()
        ],
    }


def made_up_nodes(numbers: Iterable[int]) -> Object | None:
    """Nodes of eight GPUs each that do not exist: pods on them run nothing, and say that they run.

    Only pods that tolerate their taint come there.
    """
    nodes = [_made_up(number) for number in sorted(numbers)]
    return {"apiVersion": "v1", "kind": "List", "items": nodes} if nodes else None


def _made_up(number: int) -> Object:
    sizes = {"cpu": "96", "memory": "1024Gi", "pods": "250", "nvidia.com/gpu": "8"}
    name = f"made-up-{number}"
    # A node that lacks one of these loses the other whenever kwok finds it not ready.
    addresses = [
        {"type": "InternalIP", "address": NODE_ADDRESS},
        {"type": "Hostname", "address": name},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {MADE_UP: "true", "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": MADE_UP, "value": "true", "effect": "NoSchedule"}]},
        "status": {"allocatable": sizes, "capacity": sizes, "addresses": addresses},
    }


def _volume(folder: Path) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": folder.name},
        "spec": {
            "storageClassName": STORAGE_CLASS,
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": VOLUME_SIZE},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
