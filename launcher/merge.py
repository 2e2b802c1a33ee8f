"""Job + Platform + Plan -> objects: the shape is copied, the plan's numbers go to named places."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from launcher.errors import ConfigError
from launcher.network import Fabric
from launcher.plan import Plan, Size
from launcher.platform import Platform
from trainer.config import CONFIG_VARIABLE

Object = dict[str, Any]
HASH_DIGITS = 8


def merge(job: Object, platform: Platform, plan: Plan) -> Object:
    """The whole RayJob. The launcher fills replicas, sizes, image, labels and one variable.

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
    # Kubernetes expands $(NAME) in values; a doubled dollar is a dollar.
    config = plan.trainer.model_dump_json().replace("$", "$$")
    head["template"]["spec"]["containers"][0].setdefault("env", []).append(
        {"name": CONFIG_VARIABLE, "value": config}
    )

    group = _group(shape, plan.pool)
    group.update(replicas=plan.nodes, minReplicas=plan.nodes, maxReplicas=plan.nodes)
    _fill(group, plan.image, plan.node, plan.gpu_resource, labels)
    _connect(group["template"]["spec"]["containers"][0], plan.fabric)
    shape["workerGroupSpecs"] = [group]

    merged["spec"]["rayClusterSpec"] = shape
    merged["metadata"] = {"name": f"{plan.run}-{object_hash(merged)}", **merged["metadata"]}
    return merged


def object_hash(nameless: Object) -> str:
    """The first digits of the SHA-256 of an object that has no name yet."""
    canonical = json.dumps(nameless, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_DIGITS]


def _group(shape: Object, pool: str) -> Object:
    groups: list[Object] = shape["workerGroupSpecs"]
    for group in groups:
        if group["groupName"] == pool:
            return group
    raise ConfigError(
        f"the platform's rayClusterSpec has no worker group for pool {pool}",
        f"Groups: {', '.join(group['groupName'] for group in groups)}.",
    )


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


def _connect(container: Object, fabric: Fabric) -> None:
    """Give a worker what its network needs; the plan's variables win over the shape's."""
    kept = [one for one in container.get("env", []) if one["name"] not in fabric.environment]
    added = [{"name": name, "value": value} for name, value in fabric.environment.items()]
    if kept or added:
        container["env"] = kept + added
    for quantities in container["resources"].values():
        quantities.update(fabric.resources)


def _quantities(size: Size, cpu_milli: int, gpu_resource: str | None) -> dict[str, str]:
    cpu = f"{cpu_milli // 1000}" if cpu_milli % 1000 == 0 else f"{cpu_milli}m"
    quantities = {"cpu": cpu, "memory": f"{size.memory_mib}Mi"}
    if gpu_resource is not None and size.gpus:
        quantities[gpu_resource] = f"{size.gpus}"
    return quantities
