"""Rules of Kubernetes' validation for single fields of pods: choices, names, ranges, and what must be set.

Each rule is a table of fields. A test compares the tables with the answers of a real API server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.pods.pod_validation import LABEL_KEY, LABEL_VALUE
from trainyard.rules.subject import Subject

T = TypeVar("T")

CONTAINERS = ("containers[]", "initContainers[]")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
HANDLERS = ("lifecycle.preStop", "lifecycle.postStart")
NODE_TERMS = (
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
)
NODE_EXPRESSIONS = (
    f"{NODE_TERMS}[].matchExpressions[]",
    "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[].preference.matchExpressions[]",
)
INT32 = 2**31 - 1
PROFILES = ("Localhost", "RuntimeDefault", "Unconfined")


def of_containers(*paths: str) -> tuple[str, ...]:
    """Return the paths of fields of containers, from those below a container."""
    return tuple(f"{container}.{path}" for container in CONTAINERS for path in paths)


CHOICES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("restartPolicy",): ("Always", "OnFailure", "Never"),
    ("dnsPolicy",): ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"),
    ("preemptionPolicy",): ("Never", "PreemptLowerPriority"),
    ("os.name",): ("linux", "windows"),
    ("securityContext.fsGroupChangePolicy",): ("Always", "OnRootMismatch"),
    ("securityContext.supplementalGroupsPolicy",): ("Merge", "Strict"),
    ("securityContext.seLinuxChangePolicy",): ("MountOption", "Recursive"),
    ("securityContext.seccompProfile.type", "securityContext.appArmorProfile.type"): PROFILES,
    of_containers("securityContext.seccompProfile.type", "securityContext.appArmorProfile.type"): PROFILES,
    of_containers("imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    of_containers("terminationMessagePolicy"): ("File", "FallbackToLogsOnError"),
    of_containers("ports[].protocol"): ("TCP", "UDP", "SCTP"),
    of_containers("volumeMounts[].mountPropagation"): ("None", "HostToContainer", "Bidirectional"),
    of_containers(*(f"{probe}.httpGet.scheme" for probe in (*PROBES, *HANDLERS))): ("HTTP", "HTTPS"),
    ("tolerations[].operator",): ("Equal", "Exists"),
    ("tolerations[].effect",): ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    ("topologySpreadConstraints[].whenUnsatisfiable",): ("DoNotSchedule", "ScheduleAnyway"),
    (
        "topologySpreadConstraints[].nodeAffinityPolicy",
        "topologySpreadConstraints[].nodeTaintsPolicy",
    ): ("Honor", "Ignore"),
    tuple(f"{path}.operator" for path in NODE_EXPRESSIONS): (
        *("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    ),
}  # fmt: skip
"""The values of fields that Kubernetes knows. An empty value counts as absent."""

NAME = (
    re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"),
    "must consist of lower case letters, digits, dashes and dots",
)
HOST = (
    re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"),
    "must consist of at most 63 lower case letters, digits and dashes",
)
PORT = (
    re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*"),
    "must be a number, or the name of a port: at most 15 lower case letters, digits and dashes",
)
KEY = (
    re.compile(r"(?=.{1,253}$)(?!\.$)(?!\.\.)[-._a-zA-Z0-9]+"),
    "must consist of letters, digits, `-`, `_` and `.`",
)
FIELD = (
    re.compile(
        r"metadata\.(name|namespace|uid|(labels|annotations)\['.+'\])|"
        r"spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?)"
    ),
    "is not a field that a variable may have",
)

NAMES: Mapping[tuple[str, ...], tuple[re.Pattern[str], str]] = {
    ("nodeName", "serviceAccountName", "priorityClassName", "runtimeClassName"): NAME,
    of_containers(
        *("envFrom[].configMapRef.name", "envFrom[].secretRef.name"),
        *("env[].valueFrom.configMapKeyRef.name", "env[].valueFrom.secretKeyRef.name"),
    ): NAME,
    ("hostname", "subdomain"): HOST,
    of_containers("env[].valueFrom.configMapKeyRef.key", "env[].valueFrom.secretKeyRef.key"): KEY,
    of_containers("env[].valueFrom.fieldRef.fieldPath"): FIELD,
    of_containers(
        *(f"{probe}.{kind}.port" for probe in PROBES for kind in ("httpGet", "tcpSocket"))
    ): PORT,
}
"""The patterns of texts, in words too. An empty text counts as absent."""

USERS = ("runAsUser", "runAsGroup", "fsGroup")
RANGES: Mapping[tuple[str, ...], tuple[int, int]] = {
    ("activeDeadlineSeconds", "topologySpreadConstraints[].maxSkew"): (1, INT32),
    (
        *(f"securityContext.{key}" for key in USERS),
        *of_containers(*(f"securityContext.{key}" for key in USERS)),
    ): (0, INT32),
    of_containers("ports[].hostPort"): (0, 65535),
    of_containers(
        *(f"{probe}.{kind}.port" for probe in PROBES for kind in ("httpGet", "tcpSocket", "grpc"))
    ): (1, 65535),
    tuple(
        f"volumes[].{volume}.{key}"
        for volume in ("secret", "configMap")
        for key in ("defaultMode", "items[].mode")
    ): (0, 0o777),
}
"""The smallest and the largest number of a field."""

REQUIRED: tuple[str, ...] = (
    *of_containers("volumeMounts[].mountPath"),
    *of_containers("envFrom[].configMapRef.name", "envFrom[].secretRef.name"),
    *of_containers("env[].valueFrom.configMapKeyRef.name", "env[].valueFrom.secretKeyRef.name"),
    *of_containers(*(f"{probe}.exec.command" for probe in (*PROBES, *HANDLERS))),
    "topologySpreadConstraints[].whenUnsatisfiable",
    "securityContext.seccompProfile.type",
    *of_containers("securityContext.seccompProfile.type"),
    NODE_TERMS,
)
"""Fields that may not be absent or empty if what they belong to is there."""

ONE_OF: Mapping[tuple[str, ...], tuple[str, ...]] = {
    of_containers("envFrom[]"): ("configMapRef", "secretRef"),
    of_containers(*HANDLERS): ("exec", "httpGet", "tcpSocket", "sleep"),
}
"""What must have exactly one of some fields."""

RELATIVE: tuple[str, ...] = (
    *of_containers("volumeMounts[].subPath"),
    "volumes[].configMap.items[].path",
    "volumes[].secret.items[].path",
)
"""Paths that must be relative and may not contain `..`."""


def chooses_what_kubernetes_knows(subject: Subject) -> Iterator[Violation]:
    for place, known in _fields(subject, CHOICES):
        if place.text and place.text not in known:
            yield place.breaks("choice", "is not a valid value", f"Use one of {', '.join(known)}.")


def names_things_as_kubernetes_does(subject: Subject) -> Iterator[Violation]:
    for place, (pattern, words) in _fields(subject, NAMES):
        if place.text and not pattern.fullmatch(place.text):
            yield place.breaks("pod-name", words, "Correct the value.")


def stays_in_its_range(subject: Subject) -> Iterator[Violation]:
    for place, (least, most) in _fields(subject, RANGES):
        if place.number is not None and not least <= place.number <= most:
            yield place.breaks("pod-range", f"must be {least} to {most}", "Use another number.")


def sets_what_is_required(subject: Subject) -> Iterator[Violation]:
    for path in REQUIRED:
        parent, _, key = path.rpartition(".")
        for owner in _places(subject, parent):
            place = owner.at(key)
            if owner.is_set and not place.value:
                yield place.breaks("pod-required", "is required", "Set it.")
    for place, keys in _fields(subject, ONE_OF):
        if place.is_set and sum(place.at(key).is_set for key in keys) != 1:
            yield place.breaks(
                "pod-required", f"must have exactly one of {', '.join(keys)}", "Keep one."
            )


def selects_nodes_by_labels(subject: Subject) -> Iterator[Violation]:
    for path in NODE_EXPRESSIONS:
        for place in _places(subject, path):
            key, operator, values = (place.at(one) for one in ("key", "operator", "values"))
            if not LABEL_KEY.fullmatch(key.text):
                yield key.breaks("node-label", "is not a valid key of a label", "Correct the key.")
            if operator.text in ("In", "NotIn") and not values.value:
                yield values.breaks(
                    "pod-required", "is required by the operators In and NotIn", "List values."
                )
            if operator.text in ("Exists", "DoesNotExist") and values.value:
                yield values.breaks(
                    "pod-required", "is not permitted by Exists and DoesNotExist", "Remove it."
                )
            for value in values.value if isinstance(values.value, list) else ():
                if not LABEL_VALUE.fullmatch(str(value)):
                    yield values.breaks(
                        "node-label", f"has {value!r}, which no label can have", "Correct it."
                    )


def stays_in_its_volume(subject: Subject) -> Iterator[Violation]:
    for path in RELATIVE:
        for place in _places(subject, path):
            if place.text.startswith("/") or ".." in place.text.split("/"):
                yield place.breaks(
                    "pod-path", "must be a relative path without ..", "Correct the path."
                )


def tolerates_for_a_time_what_evicts(subject: Subject) -> Iterator[Violation]:
    for toleration in _places(subject, "tolerations[]"):
        seconds, effect = toleration.at("tolerationSeconds"), toleration.at("effect")
        if seconds.is_set and effect.text != "NoExecute":
            yield seconds.breaks(
                "toleration", "needs the effect NoExecute", "Remove it, or set the effect."
            )


def _fields(subject: Subject, table: Mapping[tuple[str, ...], T]) -> Iterator[tuple[FieldPath, T]]:
    """Yield each place of a table in the object's pods, with what the table says of it."""
    for paths, value in table.items():
        for path in paths:
            for place in _places(subject, path):
                yield place, value


def _places(subject: Subject, path: str) -> Iterator[FieldPath]:
    """Yield the fields at a path below the spec of each pod; `[]` stands for each item of a list."""
    here = [group.pod for group in subject.groups]
    here.append(subject.job.at("submitterPodTemplate", "spec"))
    for step in path.split("."):
        here = [place.at(step.removesuffix("[]")) for place in here]
        if step.endswith("[]"):
            here = [item for place in here for item in place.items()]
    yield from here


RULES = (
    chooses_what_kubernetes_knows,
    names_things_as_kubernetes_does,
    stays_in_its_range,
    sets_what_is_required,
    selects_nodes_by_labels,
    stays_in_its_volume,
    tolerates_for_a_time_what_evicts,
)
