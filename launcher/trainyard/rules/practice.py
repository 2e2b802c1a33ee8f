"""What nobody checks: an object that breaks these is accepted, and then fails, hangs or surprises."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.rules.field_path import Violation
from trainyard.rules.subject import Subject

MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
SHELL_MODES = ("K8sJobMode", "SidecarMode")
OFFICIAL_IMAGE = re.compile(r"(?:.*/)?rayproject/ray(?:-ml)?:(?P<version>\d+\.\d+\.\d+)(?!\d)")
POD_PREFIX_LIMIT = 50
"""KubeRay cuts `<cluster>-<group>` there, before `-worker-xxxxx`."""

GATES = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}


def spells_its_submission_mode(subject: Subject) -> Iterator[Violation]:
    mode = subject.job.at("submissionMode")
    if mode.is_set and mode.value not in MODES:
        yield mode.breaks(
            "submission-mode",
            "is no mode, and is accepted: the job starts and nothing is ever submitted",
            f"Use one of {', '.join(MODES)}.",
        )


def names_the_dashboards_port(subject: Subject) -> Iterator[Violation]:
    ports = subject.head.container.at("ports")
    if ports.value and "dashboard" not in [port.at("name").text for port in ports.items()]:
        yield ports.breaks(
            "dashboard-port",
            "has no port named dashboard, so the operator never finds it",
            "Add {name: dashboard, containerPort: 8265}, or declare no ports at all.",
        )


def says_which_ray_it_is(subject: Subject) -> Iterator[Violation]:
    ray = subject.cluster.at("rayVersion")
    if subject.groups and subject.ray not in (None, ray.text):
        yield ray.breaks(
            "ray-version", f"the image has {subject.ray}", "Say that: probes depend on it."
        )
    for group in subject.groups:
        image = group.container.at("image")
        found = OFFICIAL_IMAGE.match(image.text)
        if found and ray.text and ray.text != found["version"]:
            yield ray.breaks(
                "ray-version",
                f"the image of {group.name} has {found['version']}",
                "Say the image's version: probes and tokens depend on it.",
                "warning",
            )
    if subject.groups and (ray.version is None or ray.version < (2, 53)):
        yield ray.breaks(
            "probes",
            "below 2.53.0 the operator's probes call wget, which slim images lack",
            "Say 2.53.0 or newer where the image has it.",
            "warning",
        )


def has_a_submitter_that_can_run(subject: Subject) -> Iterator[Violation]:
    template = subject.job.at("submitterPodTemplate")
    if subject.mode != "K8sJobMode" or not template.is_set:
        return
    policy = template.at("spec", "restartPolicy")
    if policy.text not in ("Never", "OnFailure"):
        yield policy.breaks(
            "submitter", "must be Never or OnFailure for the submitter's Job", "Use Never."
        )
    if not template.at("spec", "containers").value:
        yield template.at("spec", "containers").breaks(
            "submitter", "needs a container", "The first one submits."
        )


def has_an_entrypoint_without_shell(subject: Subject) -> Iterator[Violation]:
    entrypoint = subject.job.at("entrypoint")
    if subject.mode not in SHELL_MODES or subject.job.at("submitterPodTemplate").is_set:
        return
    if found := shell_syntax(entrypoint.text.strip()):
        yield entrypoint.breaks(
            "entrypoint",
            f"{found} is read by the submitter's shell, not by the entrypoint's",
            "Put the program into a file of the image, or use HTTPMode.",
            "warning",
        )


def shell_syntax(text: str) -> str:
    """The first thing in a command that a shell takes for its own; "" if there is none."""
    quote, escaped = "", False
    for index, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            elif quote == '"' and character in "$`":
                return character
        elif character in "'\"":
            quote = character
        elif character in ";|`$":
            return character
        elif character == "\n":
            return "a line break"
        elif text.startswith("&&", index):
            return "&&"
    return ""


def pulls_the_same_image_twice(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        image = group.container.at("image")
        name, _, digest = image.text.partition("@")
        tag = name.rpartition("/")[2].partition(":")[2]
        if image.text and not digest and tag in ("", "latest"):
            yield image.breaks(
                "image-tag",
                "is pulled anew for each pod, and may change between two attempts",
                "Give a fixed tag or a digest.",
                "warning",
            )


def limits_its_memory(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        limit = group.container.at("resources", "limits", "memory")
        if group.container.is_set and not limit.is_set:
            yield limit.breaks(
                "memory-limit",
                f"without one /dev/shm of {group.name} has no end, and Ray counts the node's memory",
                "Set it, and the request to the same.",
                "warning",
            )


def has_group_names_that_pods_keep(subject: Subject) -> Iterator[Violation]:
    cluster = f"{subject.metadata.at('name').text}{'-xxxxx' if subject.is_job else ''}"
    seen: dict[str, str] = {}
    names: set[str] = set()
    for group in subject.workers:
        name = group.place.at("groupName")
        if name.text in names:
            yield name.breaks("group-name", "stands twice", "Give each group a name of its own.")
            continue
        names.add(name.text)
        if name.text != name.text.lower():
            yield name.breaks(
                "group-name",
                "has capitals, which names of pods have not",
                "Use lower case.",
                "warning",
            )
        prefix = f"{cluster}-{name.text}"[:POD_PREFIX_LIMIT].lower()
        if prefix in seen:
            yield name.breaks(
                "group-name",
                f"is cut to the same names of pods as {seen[prefix]}",
                "Shorten the names of groups, or of the object.",
                "warning",
            )
        seen[prefix] = name.text


def has_replicas_within_their_range(subject: Subject) -> Iterator[Violation]:
    for group in subject.workers:
        replicas = group.place.at("replicas")
        least = group.place.at("minReplicas").number or 0
        most = group.place.at("maxReplicas").number
        if replicas.number is None:
            continue
        if replicas.number < least or (most is not None and replicas.number > most):
            yield replicas.breaks(
                "replicas-range",
                f"is brought between minReplicas {least} and maxReplicas {most}",
                "Say the number that you mean.",
                "warning",
            )


def has_gates_that_are_open(subject: Subject) -> Iterator[Violation]:
    if subject.kuberay == "1.6":
        return
    asked = [(subject.cluster.at(field), gate) for field, gate in GATES.items()]
    backend = subject.cluster.at("gcsFaultToleranceOptions", "backend")
    if backend.text == "rocksdb":
        asked.append((backend, "GCSFaultToleranceEmbeddedStorage"))
    for place, gate in asked:
        if place.is_set:
            yield place.breaks(
                "feature-gate",
                f"needs the operator's feature gate {gate}, which is off by default",
                f"Start the operator with -feature-gates {gate}=true.",
                "warning",
            )


def says_no_parameter_that_is_dropped(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        monitor = group.place.at("rayStartParams", "include-log-monitor")
        if subject.kuberay == "1.6" and monitor.text == "false":
            yield monitor.breaks(
                "start-parameter", "is dropped by KubeRay 1.6", "Leave it out.", "warning"
            )


RULES = (
    spells_its_submission_mode,
    names_the_dashboards_port,
    says_which_ray_it_is,
    has_a_submitter_that_can_run,
    has_an_entrypoint_without_shell,
    pulls_the_same_image_twice,
    limits_its_memory,
    has_group_names_that_pods_keep,
    has_replicas_within_their_range,
    has_gates_that_are_open,
    says_no_parameter_that_is_dropped,
)
