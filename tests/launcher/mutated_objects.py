"""RayJobs and RayClusters with mistakes: values of other types, misspelled fields, odd quantities."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.launcher.rayjobs import Object, raycluster, rayjob
from trainyard.rules import api_server, crd_schema
from trainyard.rules.pods import pod_fields, pod_validation
from trainyard.rules.subject import Subject

SCHEMA = Path(__file__).resolve().parents[2] / "launcher/trainyard/kuberay_schema.json"

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2.0, 0.5, 2**31, 2**63, "", "a", "A b", "1", "-1", "0.5", "4GB", "4Gi",
    "500m", "1e3", "1e3.5", "+1", ".5", "5.", "Mi", "yes", "v2", "Never", [], ["a"], [1], [None], [{}], {},
    {"a": "b"}, {"a": 1}, {"name": "a"}, [{"name": "a"}], [{"name": "a"}, {"name": "a"}], {"cpu": "1"},
    {"cpu": 0.5}, {"a": None}, {"kind": "Pod"},
)  # fmt: skip
NAMES = (("metadata", "name"), ("metadata", "namespace"))
"""Places that KubeRay's rules check more strictly than the API server does."""
DEPTH = 9
"""The longest way down the schema."""

HEAD = "spec.rayClusterSpec.headGroupSpec.template.spec"
POD = yaml.safe_load("""
securityContext: {runAsUser: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
restartPolicy: Never
serviceAccountName: trainer
hostname: head
terminationGracePeriodSeconds: 60
activeDeadlineSeconds: 600
nodeSelector: {pool: a100}
tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoExecute, tolerationSeconds: 5}]
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: In, values: [a]}]}]
topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
initContainers: [{name: init, image: busybox, command: [echo]}]
volumes:
  - {name: data, persistentVolumeClaim: {claimName: shared}}
  - {name: tmp, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
  - {name: settings, configMap: {name: settings, items: [{key: a, path: b}]}}
containers:
  - name: ray-head
    image: registry/trainyard:1
    imagePullPolicy: IfNotPresent
    env:
      - {name: A, value: b}
      - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
      - {name: KEY, valueFrom: {secretKeyRef: {name: keys, key: key}}}
    envFrom: [{configMapRef: {name: settings}}, {secretRef: {name: keys}, prefix: X_}]
    ports: [{name: gcs, containerPort: 6379, protocol: TCP}]
    resources:
      limits: {cpu: "1", memory: 2Gi, nvidia.com/gpu: 1}
      requests: {cpu: 500m, memory: 1Gi, nvidia.com/gpu: 1, ephemeral-storage: 1Gi}
    volumeMounts: [{name: data, mountPath: /data, subPath: a}, {name: tmp, mountPath: /tmp}]
    livenessProbe: {exec: {command: [ray, health-check]}, periodSeconds: 5}
    readinessProbe: {httpGet: {path: /, port: 8265, scheme: HTTP}, failureThreshold: 3}
    lifecycle: {preStop: {exec: {command: [ray, stop]}}}
""")
"""A valid pod with a field of each kind that the rules of pods check."""


@cache
def schema() -> Any:
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def _resolved(node: Any) -> Any:
    reference = node.get("$ref")
    return schema()["$defs"][reference.rpartition("/")[2]] if reference else node


@st.composite
def mutated(draw: st.DrawFn) -> Object:
    """An object with one to three mistakes, or changes that are none."""
    is_job = draw(st.booleans())
    document = (rayjob if is_job else raycluster)({})
    for _ in range(draw(st.integers(1, 3))):
        draw(st.sampled_from((_change_what_is_there, _set_a_field)))(draw, document)
    return document


@st.composite
def mutated_pod(draw: st.DrawFn) -> Object:
    """A pod's spec with one or two changes, which the schema of the CRDs accepts in most cases."""
    spec: Object = copy.deepcopy(POD)
    for _ in range(draw(st.integers(1, 2))):
        _change_what_is_there(draw, {"spec": spec})
    return spec


def _change_what_is_there(draw: st.DrawFn, document: Object) -> None:
    """Replace, remove, rename or repeat something that the object has."""
    places = [place for place in _places(document, ()) if len(place) > 1 and place not in NAMES]
    path = draw(st.sampled_from(places))
    parent: Any = document
    for step in path[:-1]:
        parent = parent[step]
    key = path[-1]
    action = draw(st.sampled_from(("replace", "remove", "rename", "repeat")))
    if action == "remove":
        del parent[key]
    elif action == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from((f"{key}s", f"{key}"[:-1] or "a", f"{key}".upper())))] = (
            parent.pop(key)
        )
    elif action == "repeat" and isinstance(parent, list):
        parent.append(json.loads(json.dumps(parent[key])))
    else:
        parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))


def _set_a_field(draw: st.DrawFn, document: Object) -> None:
    """Set a field anywhere in the schema to a value that may fit or not."""
    node = schema()["kinds"][f"{document['kind']}/v1"]["properties"]["spec"]
    here = document.get("spec")
    for _ in range(DEPTH):
        node = _resolved(node)
        if isinstance(here, list) and "items" in node:
            if not here:
                return
            node, here = node["items"], here[draw(st.integers(0, len(here) - 1))]
            continue
        fields = node.get("properties")
        if not isinstance(here, dict) or not fields:
            return
        key = draw(st.sampled_from(sorted(fields)))
        inner = _resolved(fields[key])
        if not isinstance(here.get(key), dict | list):
            if inner.get("properties") and draw(st.booleans()):
                here[key] = {}
            else:
                here[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
                return
        node, here = inner, here[key]


def _places(node: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    below = (
        list(node.items() if isinstance(node, dict) else enumerate(node))
        if isinstance(node, dict | list)
        else []
    )
    return [
        place for key, value in below for place in ((*path, key), *_places(value, (*path, key)))
    ]


def refusals(document: Object) -> list[str]:
    """What `trainyard check` says in the API server's place."""
    subject = Subject(document, "1.6")
    rules = (*crd_schema.RULES, *api_server.RULES)
    found = [one for rule in rules for one in rule(subject)]
    return [str(one) for one in found if one.severity == "error" and one.rule != "overflow"]


def pod_refusals(spec: Object) -> list[str] | None:
    """What the rules of pods say of a pod; None if the schema of the CRDs already refuses it."""
    subject = Subject(rayjob({HEAD: spec}), "1.6")
    by_schema, by_pods = (
        [str(one) for rule in rules for one in rule(subject) if one.severity == "error"]
        for rules in (crd_schema.RULES, (*pod_validation.RULES, *pod_fields.RULES))
    )
    return None if by_schema else by_pods
