"""Job + Platform + Plan -> objects: the shape is copied, the plan's numbers go to named places."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from typing import Any

from trainyard.planning.plan import DataGroup, Plan, Size
from trainyard.platform import Platform
from trainyard.run_file.network import NetworkRequirements
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    DATA_LABELS,
    WORKER_RESOURCE,
)
from trainyard_trainer.run_files import submission

Object = dict[str, Any]
HASH_DIGITS = 8
DATA_SUFFIX = "-data"
GPU_OF_KUBERAY = re.compile(r".*gpu|nvidia\.com/mig-.*")
"""Resources that KubeRay takes for GPUs of Ray; of others it must be told their number."""


def merge(job: Object, platform: Platform, plan: Plan) -> Object:
    """The whole RayJob. The launcher fills replicas, sizes, image, labels and the variables of the
    driver.

    A new volume, sidecar or node selector belongs into the chart.
    """
    merged = copy.deepcopy(job)
    shape = copy.deepcopy(platform.ray_cluster_spec)
    # A queue counts the RayJob: its labels on the pods would have them wait once more.
    labels = {
        label: value
        for label, value in merged["metadata"]["labels"].items()
        if label not in plan.queue_labels
    }

    head = shape["headGroupSpec"]
    _fill(head, plan.image, plan.head, None, labels)
    head["template"]["spec"]["containers"][0].setdefault("env", []).append(
        {"name": CONFIG_VARIABLE, "value": _escaped(plan.trainer.model_dump_json())}
    )
    if plan.code is not None and not plan.code.is_uploaded:
        head["template"]["spec"]["containers"][0]["env"].append(
            {"name": CODE_VARIABLE, "value": plan.code.text}
        )

    group = copy.deepcopy(platform.worker_group(plan.pool))
    group.update(replicas=plan.min_nodes, minReplicas=plan.min_nodes, maxReplicas=plan.nodes)
    _fill_workers(group, plan.image, plan.node, plan.gpu_resource, labels)
    _add_network(group["template"]["spec"]["containers"][0], plan.network_requirements)
    if plan.trainer.scaling.has_worker_places:
        group["resources"] = {WORKER_RESOURCE: f"{plan.workers_per_node}"}
    groups = [group]
    if plan.data is not None:
        groups.append(_data_group(platform, plan.data, plan.image, labels))
    shape["workerGroupSpecs"] = groups
    if plan.is_elastic:
        _autoscale(shape, platform)

    merged["spec"]["rayClusterSpec"] = shape
    head["template"]["spec"]["containers"][0]["env"].append(
        {"name": submission.VARIABLE, "value": _escaped(_submission(merged, plan))}
    )
    merged["metadata"] = {"name": f"{plan.run}-{object_hash(merged)}", **merged["metadata"]}
    return merged


def object_hash(nameless: Object) -> str:
    """The first digits of the SHA-256 of an object that has no name yet."""
    canonical = json.dumps(nameless, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_DIGITS]


def _submission(nameless: Object, plan: Plan) -> str:
    """What the driver leaves in the run's folder beside its config: the rest of the run file, and
    the hash of each part of the RayJob, by which a change of the platform is told. A namespace
    changes no part."""
    metadata = {key: value for key, value in nameless["metadata"].items() if key != "namespace"}
    spec = dict(nameless["spec"])
    shape = dict(spec.pop("rayClusterSpec"))
    parts = {"head": shape.pop("headGroupSpec")}
    parts |= {f"group {each['groupName']}": each for each in shape.pop("workerGroupSpecs")}
    parts |= {"cluster": shape, "job": {**nameless, "metadata": metadata, "spec": spec}}
    hashes = {name: object_hash(part) for name, part in parts.items()}
    return json.dumps({"launch": plan.launch, "parts": hashes}, separators=(",", ":"))


def _escaped(value: str) -> str:
    """Kubernetes expands $(NAME) in values; a doubled dollar is a dollar."""
    return value.replace("$", "$$")


def _data_group(platform: Platform, data: DataGroup, image: str, labels: dict[str, str]) -> Object:
    """The Ray pods that read and decode: those of their pool, under labels that the Ray loader asks
    for."""
    group = copy.deepcopy(platform.worker_group(data.pool))
    group.update(
        groupName=f"{data.pool}{DATA_SUFFIX}",
        replicas=data.nodes,
        minReplicas=data.nodes,
        maxReplicas=data.nodes,
        labels={**(group.get("labels") or {}), **DATA_LABELS},
    )
    _fill_workers(group, image, data.node, None, labels)
    return group


def _autoscale(shape: Object, platform: Platform) -> None:
    """Ray's autoscaler beside the head, with what the platform gives to it alone."""
    assert platform.autoscaler is not None
    shape["enableInTreeAutoscaling"] = True
    shape["autoscalerOptions"] = copy.deepcopy(platform.autoscaler.options)
    pod = shape["headGroupSpec"]["template"]["spec"]
    pod["volumes"] = [*(pod.get("volumes") or []), *copy.deepcopy(platform.autoscaler.volumes)]


def _fill_workers(
    group: Object, image: str, size: Size, gpu_resource: str | None, labels: dict[str, str]
) -> None:
    _fill(group, image, size, gpu_resource, labels)
    start = {"object-store-memory": f"{size.object_store_mib * 2**20}"}
    if gpu_resource is not None and not GPU_OF_KUBERAY.fullmatch(gpu_resource):
        start["num-gpus"] = f"{size.gpus}"
    group["rayStartParams"] = {**(group.get("rayStartParams") or {}), **start}


def _fill(
    group: Object, image: str, size: Size, gpu_resource: str | None, labels: dict[str, str]
) -> None:
    template = group["template"]
    template.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    container = template["spec"]["containers"][0]
    container["image"] = image
    container["resources"] = {
        "requests": _quantities(size, size.cpu_request_milli, gpu_resource),
        "limits": _quantities(size, size.cpu_limit_milli, gpu_resource),
    }


def _add_network(container: Object, network: NetworkRequirements) -> None:
    """Add the network's variables and devices to a worker's container; its variables replace those
    of the shape."""
    kept = [one for one in container.get("env", []) if one["name"] not in network.environment]
    added = [{"name": name, "value": value} for name, value in network.environment.items()]
    if kept or added:
        container["env"] = kept + added
    for quantities in container["resources"].values():
        quantities.update(network.resources)


def _quantities(size: Size, cpu_milli: int, gpu_resource: str | None) -> dict[str, str]:
    cpu = f"{cpu_milli // 1000}" if cpu_milli % 1000 == 0 else f"{cpu_milli}m"
    quantities = {"cpu": cpu, "memory": f"{size.memory_mib}Mi"}
    if gpu_resource is not None and size.gpus:
        quantities[gpu_resource] = f"{size.gpus}"
    if size.disk_mib is not None:
        quantities["ephemeral-storage"] = f"{size.disk_mib}Mi"
    return quantities
