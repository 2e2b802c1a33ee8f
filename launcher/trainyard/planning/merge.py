"""Build the RayJob of a run from the rendered template, the platform's pod templates and the plan's
numbers."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainyard.errors import ConfigError
from trainyard.planning.driver_variables import (
    add_to_head,
    add_to_job,
    json_for_ray,
)
from trainyard.planning.nodes.placement import worker_group
from trainyard.planning.plan import Plan
from trainyard.planning.sizing.pod_sizes import DataGroup, PodSize
from trainyard.platform import DataVolume, Platform
from trainyard.run_file.code.source import GitState
from trainyard.run_file.network import NetworkRequirements
from trainyard_trainer.config.notify import NOTIFY_VARIABLE, Notify
from trainyard_trainer.config.replaceable import replaces_workers
from trainyard_trainer.config.scaling import DATA_LABELS, WORKER_RESOURCE
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, CONFIG_VARIABLE, TrainerConfig
from trainyard_trainer.config.variables import SecretKey
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE
from trainyard_trainer.run_files.standing_cluster import (
    CLUSTER_VARIABLE,
    PLACES_VARIABLE,
    RETRIES_VARIABLE,
    standing_cluster_of,
)

if TYPE_CHECKING:
    from trainyard.planning.render import RenderedTemplate

Object = dict[str, Any]
HASH_DIGITS = 8
DATA_SUFFIX = "-data"
"""The ending of the worker group's name whose nodes only read data."""
KUBERAY_GPU = re.compile(r".*gpu|nvidia\.com/mig-.*")
"""Resource names that KubeRay passes to Ray as GPUs. For other names the number of GPUs is a start
parameter."""


def merge(rendered: RenderedTemplate, platform: Platform, plan: Plan) -> Object:
    """Build the whole RayJob.

    The launcher sets only what depends on the run: replicas, image, sizes, pod metadata, and the
    variables of driver, network and Secrets, and the data volumes that the run file names.
    Everything else of a pod, such as other volumes and node selectors, belongs to the chart. A run on a
    standing RayCluster has no pods of its own.
    """
    job = copy.deepcopy(rendered.job)
    if plan.standing_cluster is not None:
        return _on_standing_cluster(job, plan, plan.standing_cluster)
    shape = copy.deepcopy(platform.ray_cluster_spec)
    job["spec"]["rayClusterSpec"] = shape

    head = shape["headGroupSpec"]
    _fill(head, plan.image, plan.head, None)
    shape["workerGroupSpecs"] = [_worker_group(platform, plan)]
    if plan.data is not None:
        shape["workerGroupSpecs"].append(_data_group(platform, plan.data, plan.image))
    for group in (head, *shape["workerGroupSpecs"]):
        _add_metadata(group["template"], rendered.pod_metadata)
        _add_volumes(group["template"]["spec"], plan.volumes)
        _add_secrets(group, plan.trainer.secrets)
    if plan.is_elastic:
        _add_autoscaler(shape, platform)

    if plan.trainer.notify is not None:
        _add_receiver(head, plan.trainer.notify)
    add_to_head(head, {CONFIG_VARIABLE: plan.trainer.model_dump_json(), **_code(plan)})
    # The last variable holds hashes of everything above, and the name holds a hash of the whole object.
    add_to_head(head, {submission.VARIABLE: _submission(job, plan)})
    return _named(job, plan)


def _on_standing_cluster(job: Object, plan: Plan, cluster: str) -> Object:
    """Complete the RayJob of a run on a standing RayCluster."""
    variables = {
        **plan.network_requirements.environment,
        CLUSTER_VARIABLE: cluster,
        RETRIES_VARIABLE: f"{plan.retries}",
        **({PLACES_VARIABLE: f"{plan.returning_places}"} if plan.returning_places else {}),
        CONFIG_VARIABLE: json_for_ray(plan.trainer.model_dump_json()),
        **_code(plan),
    }
    add_to_job(job["spec"], variables)
    add_to_job(job["spec"], {submission.VARIABLE: json_for_ray(_submission(job, plan))})
    return _named(job, plan)


def _code(plan: Plan) -> dict[str, str]:
    """Return the variable with the packed code; empty without code, or if `submit` uploads it."""
    if plan.code is None or plan.code.is_uploaded:
        return {}
    return {CODE_VARIABLE: plan.code.text}


def _named(job: Object, plan: Plan) -> Object:
    """Return a RayJob with its name, which ends in a hash of the rest."""
    return job | {"metadata": {"name": f"{plan.run}-{object_hash(job)}", **job["metadata"]}}


def with_source(job: Object, source: GitState | None) -> Object:
    """Return the RayJob with the git revision in its head, for the run's record.

    Neither the name nor a hash in the RayJob depends on it: a commit makes no other submission of a run.
    """
    if source is None:
        return job
    job, text = copy.deepcopy(job), source.model_dump_json()
    if standing_cluster_of(job) is not None:
        add_to_job(job["spec"], {submission.SOURCE_VARIABLE: json_for_ray(text)})
    else:
        add_to_head(
            job["spec"]["rayClusterSpec"]["headGroupSpec"], {submission.SOURCE_VARIABLE: text}
        )
    return job


def object_hash(nameless: Object) -> str:
    """Return the first digits of the SHA-256 of an object without a name."""
    canonical = json.dumps(nameless, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_DIGITS]


def _submission(nameless: Object, plan: Plan) -> str:
    """Return, as JSON, what the driver records in the run's folder beside its config.

    This is the rest of the run file, and a hash of each part of the RayJob, which shows later
    whether the platform has changed. The namespace changes no hash.
    """
    metadata = {key: value for key, value in nameless["metadata"].items() if key != "namespace"}
    spec, parts = dict(nameless["spec"]), {}
    if plan.standing_cluster is None:
        shape = dict(spec.pop("rayClusterSpec"))
        parts = {"head": shape.pop("headGroupSpec")}
        parts |= {f"group {each['groupName']}": each for each in shape.pop("workerGroupSpecs")}
        parts["cluster"] = shape
    parts["job"] = {**nameless, "metadata": metadata, "spec": spec}
    hashes = {name: object_hash(part) for name, part in parts.items()}
    return json.dumps({"launch": plan.launch, "parts": hashes}, separators=(",", ":"))


def _add_metadata(template: Object, metadata: Mapping[str, Mapping[str, str]]) -> None:
    """Add the run's labels and annotations to a pod template; they replace those of the shape."""
    for field, values in metadata.items():
        template.setdefault("metadata", {}).setdefault(field, {}).update(values)


def _add_volumes(pod: Object, volumes: Sequence[DataVolume]) -> None:
    """Append data volumes to a pod, and their mounts to its Ray container."""
    container = pod["containers"][0]
    for data in volumes:
        pod["volumes"] = [*(pod.get("volumes") or []), copy.deepcopy(data.volume)]
        mounts = container.get("volumeMounts") or []
        container["volumeMounts"] = [*mounts, copy.deepcopy(data.mount)]


def _add_secrets(group: Object, secrets: Mapping[str, SecretKey]) -> None:
    """Append the variables that come from Secrets to the Ray container of a group, as references.

    Ray's processes inherit the environment of the container. Raises ConfigError for a variable that the
    container already has.
    """
    container = group["template"]["spec"]["containers"][0]
    names = {variable["name"] for variable in container.get("env", [])}
    for name, secret in secrets.items():
        if name in names:
            raise ConfigError(
                f"secrets.{name}: the pods of the platform already have the variable {name}",
                "Use another name, or ask the platform's administrator to remove it from the chart's values.",
            )
        reference = {"secretKeyRef": {"name": secret.name, "key": secret.key}}
        container.setdefault("env", []).append({"name": name, "valueFrom": reference})


def _add_receiver(head: Object, notify: Notify) -> None:
    """Append the variable with the address of `notify.secret` to the head, as a reference.

    Without the Secret the head starts all the same, and the driver says that it has no address.
    """
    if notify.secret is not None:
        reference = {"name": notify.secret.name, "key": notify.secret.key, "optional": True}
        container = head["template"]["spec"]["containers"][0]
        container.setdefault("env", []).append(
            {"name": NOTIFY_VARIABLE, "valueFrom": {"secretKeyRef": reference}}
        )


def _worker_group(platform: Platform, plan: Plan) -> Object:
    """Build the group of Ray pods whose workers train."""
    group = worker_group(platform, plan.pools, plan.topology_mode)
    fewest, most = plan.min_nodes + plan.spares, plan.nodes + plan.spares
    group.update(replicas=fewest, minReplicas=fewest, maxReplicas=most)
    _fill_workers(group, plan.image, plan.node, plan.gpu_resource)
    _add_network(group["template"]["spec"]["containers"][0], plan.network_requirements)
    if plan.trainer.scaling.has_worker_places:
        group["resources"] = {WORKER_RESOURCE: f"{plan.workers_per_node}"}
    if isinstance(plan.trainer, TrainerConfig) and replaces_workers(plan.trainer):
        # The others wait for a replacement, which starts faster if it need not import anything.
        container = group["template"]["spec"]["containers"][0]
        container.setdefault("env", []).append({"name": LOCAL_RAY_VARIABLE, "value": "forked"})
    return group


def _data_group(platform: Platform, data: DataGroup, image: str) -> Object:
    """Build the group of Ray pods that read and decode data; the Ray loader selects them by their
    Ray labels."""
    group = copy.deepcopy(platform.worker_group(data.pool))
    group.update(
        groupName=f"{data.pool}{DATA_SUFFIX}",
        replicas=data.nodes,
        minReplicas=data.nodes,
        maxReplicas=data.nodes,
        labels={**(group.get("labels") or {}), **DATA_LABELS},
    )
    _fill_workers(group, image, data.node, None)
    return group


def _add_autoscaler(shape: Object, platform: Platform) -> None:
    """Enable Ray's autoscaler in the head pod, with the options and volumes that the platform
    publishes for it."""
    assert platform.autoscaler is not None
    shape["enableInTreeAutoscaling"] = True
    shape["autoscalerOptions"] = copy.deepcopy(platform.autoscaler.options)
    pod = shape["headGroupSpec"]["template"]["spec"]
    pod["volumes"] = [*(pod.get("volumes") or []), *copy.deepcopy(platform.autoscaler.volumes)]


def _fill_workers(group: Object, image: str, size: PodSize, gpu_resource: str | None) -> None:
    """Set image, sizes and Ray start parameters of a worker group."""
    _fill(group, image, size, gpu_resource)
    start = {"object-store-memory": f"{size.object_store_mib * 2**20}"}
    if gpu_resource is not None and not KUBERAY_GPU.fullmatch(gpu_resource):
        start["num-gpus"] = f"{size.gpus}"
    group["rayStartParams"] = {**(group.get("rayStartParams") or {}), **start}


def _fill(group: Object, image: str, size: PodSize, gpu_resource: str | None) -> None:
    """Set the image of the Ray container of a group, and add the plan's resources to those of the
    shape."""
    container = group["template"]["spec"]["containers"][0]
    further = container.get("resources") or {}
    container["image"] = image
    container["resources"] = {
        "requests": (further.get("requests") or {})
        | _quantities(size, size.cpu_request_milli, gpu_resource),
        "limits": (further.get("limits") or {})
        | _quantities(size, size.cpu_limit_milli, gpu_resource),
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


def _quantities(size: PodSize, cpu_milli: int, gpu_resource: str | None) -> dict[str, str]:
    """Write the resources of a pod as Kubernetes quantities by resource name."""
    cpu = f"{cpu_milli // 1000}" if cpu_milli % 1000 == 0 else f"{cpu_milli}m"
    quantities = {"cpu": cpu, "memory": f"{size.memory_mib}Mi"}
    if gpu_resource is not None and size.gpus:
        quantities[gpu_resource] = f"{size.gpus}"
    if size.disk_mib is not None:
        quantities["ephemeral-storage"] = f"{size.disk_mib}Mi"
    return quantities
