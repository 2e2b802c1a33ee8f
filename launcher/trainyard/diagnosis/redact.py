"""Objects without what tells nothing, and without values of variables: fit to be sent to others."""

from __future__ import annotations

from typing import Any

from trainyard.diagnosis.snapshot import Object, name_of
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE

NOISE = frozenset(
    (
        "args", "command", "containerID", "dnsPolicy", "enableServiceLinks", "fsGroupChangePolicy",
        "generation", "hostIP", "hostIPs", "imageID",
        "kubectl.kubernetes.io/last-applied-configuration", "livenessProbe", "managedFields",
        "observedGeneration", "ownerReferences", "podIPs", "preemptionPolicy", "qosClass",
        "rayClusterStatus", "readinessProbe", "resourceVersion", "schedulerName", "securityContext",
        "serviceAccount", "terminationMessagePath", "terminationMessagePolicy", "volumeMounts",
    )
)  # fmt: skip
OF_AN_EVENT = ("eventTime", "lastTimestamp", "message", "reason", "type")


def trimmed(thing: Object) -> Object:
    """Without noise. Of variables only the run's config has a value: it holds no secret."""
    return dict(_trimmed(thing))


def _trimmed(value: Any) -> Any:
    if isinstance(value, list):
        return [_trimmed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("name") != CONFIG_VARIABLE and "value" in value and "name" in value:
        return {"name": value["name"]}
    return {key: _trimmed(inner) for key, inner in value.items() if key not in NOISE}


def trimmed_pod(pod: Object) -> Object:
    """Its variables by name alone: the RayJob has the config."""
    short = trimmed(pod)
    for container in [*(short["spec"].get("initContainers") or []), *short["spec"]["containers"]]:
        if "env" in container:
            container["env"] = [{"name": variable["name"]} for variable in container["env"]]
    return short


def trimmed_cluster(ray_cluster: Object) -> Object:
    """How it stands; what it should be stands in the RayJob."""
    status = ray_cluster.get("status") or {}
    kept = {key: status[key] for key in ("conditions", "reason", "state") if key in status}
    return {"metadata": {"name": name_of(ray_cluster)}, "status": _trimmed(kept)}


def trimmed_event(event: Object) -> Object:
    """What was said of what, and when."""
    about = event.get("involvedObject") or {}
    return {
        "metadata": {"name": name_of(event)},
        "involvedObject": {"kind": about.get("kind", ""), "name": about.get("name", "")},
        **{key: event[key] for key in OF_AN_EVENT if event.get(key)},
    }


def trimmed_node(node: Object) -> Object:
    """What the scheduler looks at."""
    return {
        "metadata": {"name": name_of(node), "labels": node["metadata"].get("labels") or {}},
        "spec": {"taints": node.get("spec", {}).get("taints") or []},
        "status": {"allocatable": node.get("status", {}).get("allocatable") or {}},
    }
