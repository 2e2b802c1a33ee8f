"""Rules of Kubernetes' validation of pods, applied to the pod templates of an object.

The CRDs of KubeRay describe only the types of a template's fields. The API server therefore accepts a
RayJob with an invalid template, and later refuses each of its pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from trainyard.quantities import quantity
from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

CONTAINER_LISTS = ("initContainers", "containers")
STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
RESOURCE_NAME = re.compile(
    r"(?=.{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
    r"/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
FRACTION_OF_TEN = re.compile(r"[+-]?[\d.]+[eE][+-]?(\d*\.\d*)")
PORT_LIMIT = 65535
PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
LABEL_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = re.compile(
    rf"((?=[^/]{{1,253}}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?{LABEL_PART}"
)
LABEL_VALUE = re.compile(rf"({LABEL_PART})?")
VARIABLE_SOURCES = (
    "fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef",
)  # fmt: skip
PROBE_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
NAMED_SOURCES = {
    "configMap": "name",
    "secret": "secretName",
    "persistentVolumeClaim": "claimName",
    "hostPath": "path",
}
"""Volume sources with a required key, and that key."""


def asks_for_resources_that_exist(subject: Subject) -> Iterator[Violation]:
    for container in _containers(subject):
        requests, limits = (container.at("resources", key) for key in ("requests", "limits"))
        for place, amount in [*_amounts(limits), *_amounts(requests)]:
            name = _resource(place)
            if amount < 0:
                yield place.breaks("resources", "is below 0", "Use 0 or more.")
            if not _is_known(name):
                yield place.breaks(
                    "resources",
                    "is not a resource name of Kubernetes",
                    f"Use {', '.join(STANDARD_RESOURCES)}, or DOMAIN/NAME such as nvidia.com/gpu.",
                )
            if name.startswith("hugepages-") and not any(
                container.at("resources", key, other).is_set
                for key in ("requests", "limits")
                for other in ("cpu", "memory")
            ):
                yield place.breaks(
                    "resources",
                    "needs a request or limit of cpu or memory",
                    "Add a limit for memory.",
                )
            if _is_extended(name) and amount.denominator != 1:
                yield place.breaks(
                    "resources",
                    f"must be a whole number: {name} cannot be divided",
                    "Request whole devices.",
                )


def writes_quantities(subject: Subject) -> Iterator[Violation]:
    """Refuse quantities such as 1e3.5, which the schema of the CRDs accepts and that of pods does not.

    The rule of the schema reports those that it refuses itself.
    """
    quantities = [
        *(
            each.at("resources", key)
            for each in _containers(subject)
            for key in ("requests", "limits")
        ),
        *(each.at("emptyDir") for pod in _pods(subject) for each in pod.at("volumes").items()),
    ]
    for each in quantities:
        for place, amount in _parsed(each):
            if amount is None and FRACTION_OF_TEN.fullmatch(place.text):
                yield place.breaks(
                    "quantity", "has an exponent that is no whole number", "Write 500m or 4Gi."
                )


def requests_at_most_its_limits(subject: Subject) -> Iterator[Violation]:
    for container in _containers(subject):
        requests, limits = (container.at("resources", key) for key in ("requests", "limits"))
        most = {_resource(place): amount for place, amount in _amounts(limits)}
        for place, amount in _amounts(requests):
            name = _resource(place)
            limit = most.get(name)
            if not _overcommits(name) and limit is None:
                yield place.breaks(
                    "resources", "has a request but no limit", "Set the limit to the same amount."
                )
            elif not _overcommits(name) and amount != limit:
                yield place.breaks(
                    "resources",
                    f"differs from its limit {limits.at(name).value}, and {name} cannot be overcommitted",
                    "Set both to the same amount.",
                )
            elif limit is not None and amount > limit:
                yield place.breaks(
                    "resources",
                    f"is above its limit {limits.at(name).value}",
                    "Lower the request, or raise the limit.",
                )


def names_its_containers(subject: Subject) -> Iterator[Violation]:
    for pod in _pods(subject):
        seen: set[str] = set()
        for container in _containers_of(pod):
            name, image = container.at("name"), container.at("image")
            if name.is_set and not DNS_LABEL.fullmatch(name.text):
                yield name.breaks(
                    "container-fields",
                    "must consist of lower case letters, digits and dashes",
                    "Rename the container.",
                )
            if name.text in seen:
                yield name.breaks(
                    "container-fields",
                    "is used by two containers",
                    "Give each container its own name.",
                )
            seen.add(name.text)
            if not image.text:
                yield image.breaks(
                    "container-fields", "is required", "Set the image of the container."
                )
            if image.text != image.text.strip():
                yield image.breaks(
                    "container-fields", "begins or ends with whitespace", "Remove it."
                )


def gives_a_variable_one_value(subject: Subject) -> Iterator[Violation]:
    for container in _containers(subject):
        for entry in container.at("env").items():
            source = entry.at("valueFrom")
            if entry.at("value").text and source.value:
                yield entry.breaks(
                    "variable", "has both value and valueFrom", "Keep one of the two."
                )
            if source.is_set and _count(source, VARIABLE_SOURCES) != 1:
                yield source.breaks(
                    "variable",
                    f"must have exactly one of {', '.join(VARIABLE_SOURCES)}",
                    "Keep one of them.",
                )
            name = entry.at("name")
            if name.is_set and (not name.text or "=" in name.text):
                yield name.breaks("variable", "is not a valid name of a variable", "Rename it.")


def tolerates_taints_that_can_be(subject: Subject) -> Iterator[Violation]:
    for pod in _pods(subject):
        for toleration in pod.at("tolerations").items():
            key, operator, value = (toleration.at(one) for one in ("key", "operator", "value"))
            if not key.text and operator.text != "Exists":
                yield operator.breaks(
                    "toleration", "must be Exists if there is no key", "Add a key."
                )
            if operator.text == "Exists" and value.text:
                yield value.breaks(
                    "toleration", "cannot be combined with operator Exists", "Remove it."
                )
            if key.text and not LABEL_KEY.fullmatch(key.text):
                yield key.breaks("toleration", "is not a valid key of a taint", "Correct the key.")


def labels_with_what_labels_may_hold(subject: Subject) -> Iterator[Violation]:
    places = [subject.metadata.at("labels")]
    places += [pod.at("nodeSelector") for pod in _pods(subject)]
    places += [group.place.at("template", "metadata", "labels") for group in subject.groups]
    for labels in places:
        for key, value in labels.entries():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value.text):
                yield value.breaks(
                    "label",
                    "is not a valid label",
                    "Use at most 63 letters, digits, `-`, `_` and `.`; a letter or digit at both ends.",
                )
    for key, value in subject.metadata.at("annotations").entries():
        if not LABEL_KEY.fullmatch(key.lower()):
            yield value.breaks("label", "is not a valid key of an annotation", "Correct the key.")


def mounts_volumes_that_it_has(subject: Subject) -> Iterator[Violation]:
    for pod in _pods(subject):
        # KubeRay itself adds this volume to the Ray container.
        volumes = {"shared-mem"}
        for volume in pod.at("volumes").items():
            name = volume.at("name")
            if name.is_set and not DNS_LABEL.fullmatch(name.text):
                yield name.breaks(
                    "volume",
                    "must consist of lower case letters, digits and dashes",
                    "Rename the volume.",
                )
            if name.text in volumes - {"shared-mem"}:
                yield name.breaks(
                    "volume", "is used by two volumes", "Give each volume its own name."
                )
            volumes.add(name.text)
            sources = [key for key, place in volume.entries() if key != "name" and place.is_set]
            if len(sources) > 1:
                yield volume.breaks(
                    "volume", f"has more than one source: {', '.join(sources)}", "Keep one of them."
                )
            for source, key in NAMED_SOURCES.items():
                if volume.at(source).is_set and not volume.at(source, key).text:
                    yield volume.at(source, key).breaks("volume", "is required", "Set it.")
        for container in _containers_of(pod):
            paths: set[str] = set()
            for mount in container.at("volumeMounts").items():
                name, path = mount.at("name"), mount.at("mountPath")
                if name.text and name.text not in volumes:
                    yield name.breaks(
                        "volume",
                        "is not a volume of the pod",
                        "Add it to volumes, or remove the mount.",
                    )
                if path.text and path.text in paths:
                    yield path.breaks("volume", "is mounted twice", "Keep one of the mounts.")
                paths.add(path.text)


def opens_ports_that_exist(subject: Subject) -> Iterator[Violation]:
    for container in _containers(subject):
        names: set[str] = set()
        for port in container.at("ports").items():
            number, name = port.at("containerPort"), port.at("name")
            if number.number is not None and not 1 <= number.number <= PORT_LIMIT:
                yield number.breaks("port", f"must be 1 to {PORT_LIMIT}", "Use another port.")
            if name.text and not PORT_NAME.fullmatch(name.text):
                yield name.breaks(
                    "port",
                    "must consist of at most 15 lower case letters, digits and dashes, with at least "
                    "one letter",
                    "Rename the port.",
                )
            if name.text and name.text in names:
                yield name.breaks("port", "is used by two ports", "Give each port its own name.")
            names.add(name.text)


def probes_in_one_way(subject: Subject) -> Iterator[Violation]:
    for container in _containers(subject):
        for key in ("livenessProbe", "readinessProbe", "startupProbe"):
            probe = container.at(key)
            if probe.is_set and _count(probe, PROBE_HANDLERS) != 1:
                yield probe.breaks(
                    "probe", f"must have exactly one of {', '.join(PROBE_HANDLERS)}", "Keep one."
                )
            for _, place in probe.entries():
                if (place.number or 0) < 0:
                    yield place.breaks("probe", "must be at least 0", "Use 0 or more.")


def _pods(subject: Subject) -> Iterator[FieldPath]:
    """Yield the specs of all pods that the object describes."""
    for group in subject.groups:
        yield group.pod
    yield subject.job.at("submitterPodTemplate", "spec")


def _containers_of(pod: FieldPath) -> Iterator[FieldPath]:
    for key in CONTAINER_LISTS:
        yield from pod.at(key).items()


def _containers(subject: Subject) -> Iterator[FieldPath]:
    for pod in _pods(subject):
        yield from _containers_of(pod)


def _amounts(quantities: FieldPath) -> Iterator[tuple[FieldPath, Fraction]]:
    """Yield the quantities of a mapping, without invalid ones."""
    for place, amount in _parsed(quantities):
        if amount is not None:
            yield place, amount


def _parsed(quantities: FieldPath) -> Iterator[tuple[FieldPath, Fraction | None]]:
    """Yield the values of a mapping with their amounts, which are None for an invalid quantity."""
    for _, place in quantities.entries():
        value = place.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # The schema takes 2.0 for a whole number.
        if isinstance(value, int | str) and not isinstance(value, bool):
            try:
                yield place, quantity(value)
            except ValueError:
                yield place, None


def _resource(place: FieldPath) -> str:
    """Return the last key of a path: `resources.limits[nvidia.com/gpu]` -> `nvidia.com/gpu`."""
    return (
        place.path[:-1].rpartition("[")[2]
        if place.path[-1] == "]"
        else place.path.rpartition(".")[2]
    )


def _count(place: FieldPath, keys: tuple[str, ...]) -> int:
    """Return how many of the keys are set."""
    return sum(place.at(key).is_set for key in keys)


def _is_known(name: str) -> bool:
    if name in STANDARD_RESOURCES or name.startswith("hugepages-"):
        return True
    return bool(RESOURCE_NAME.fullmatch(name)) and not name.startswith("requests.")


def _is_extended(name: str) -> bool:
    return "/" in name and not name.partition("/")[0].endswith("kubernetes.io")


def _overcommits(name: str) -> bool:
    """Whether the request of a resource may be below its limit."""
    return ("/" not in name or "kubernetes.io/" in name) and not name.startswith("hugepages-")


RULES = (
    writes_quantities,
    asks_for_resources_that_exist,
    requests_at_most_its_limits,
    names_its_containers,
    gives_a_variable_one_value,
    tolerates_taints_that_can_be,
    labels_with_what_labels_may_hold,
    probes_in_one_way,
    mounts_volumes_that_it_has,
    opens_ports_that_exist,
)
