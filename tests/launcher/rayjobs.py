"""A RayJob and a RayCluster that obey all rules, to be broken one place at a time."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import yaml

Object = dict[str, Any]

ABSENT = object()
"""As a change: remove what stands there."""

CLUSTER = yaml.safe_load("""
rayVersion: 2.60.0
authOptions: {mode: token}
headGroupSpec:
  rayStartParams: {num-cpus: "0"}
  template:
    spec:
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: ray-head
          image: registry/trainyard:1
          resources: {limits: {cpu: "1", memory: 2Gi}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
workerGroupSpecs:
  - groupName: gpu
    replicas: 2
    minReplicas: 2
    maxReplicas: 2
    rayStartParams: {}
    template:
      spec:
        securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
        containers:
          - name: ray-worker
            image: registry/trainyard:1
            resources: {limits: {cpu: "1", memory: 2Gi}}
            securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
""")


def rayjob(changes: Object) -> Object:
    """The RayJob with some places changed: `{"spec.rayClusterSpec.rayVersion": ABSENT}`."""
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "digits-0123abcd", "namespace": "team"},
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": "python -m trainyard_trainer",
            "shutdownAfterJobFinishes": False,
            "deletionStrategy": {
                "deletionRules": [
                    {
                        "policy": "DeleteCluster",
                        "condition": {"jobStatus": "SUCCEEDED", "ttlSeconds": 600},
                    }
                ]
            },
            "rayClusterSpec": copy.deepcopy(CLUSTER),
        },
    }
    return _changed(job, changes)


def raycluster(changes: Object) -> Object:
    """The RayCluster with some places changed."""
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "standing", "namespace": "team"},
        "spec": copy.deepcopy(CLUSTER),
    }
    return _changed(cluster, changes)


def _changed(document: Object, changes: Object) -> Object:
    for path, value in changes.items():
        keys: list[Any] = [
            int(key) if key.isdecimal() else key
            for key in path.replace("[", ".").replace("]", "").split(".")
        ]
        here: Any = document
        for key, following in pairwise(keys):
            empty: Any = [] if isinstance(following, int) else {}
            here = here[key] if isinstance(here, list) else here.setdefault(key, empty)
        if value is ABSENT:
            here.pop(keys[-1], None)
            continue
        if isinstance(value, tuple):
            value = _derived(document, *value)
        if isinstance(here, list) and keys[-1] == len(here):
            here.append(value)
        else:
            here[keys[-1]] = copy.deepcopy(value)
    return document


def _derived(document: Object, what: str, argument: Any) -> Any:
    """What is made of the document itself: `("copy", path)`, or `("groups", number)`."""
    cluster = document["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"][:1]
    if what == "copy":
        return copy.deepcopy(group)
    return [copy.deepcopy(group) | {"groupName": f"group{number}"} for number in range(argument)]
