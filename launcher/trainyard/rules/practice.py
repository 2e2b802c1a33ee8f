"""Rules that neither the API server nor the operator checks: an object that breaks one is accepted, and later
fails, hangs or behaves unexpectedly."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.rules.field_path import Violation
from trainyard.rules.subject import Subject

MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
SHELL_MODES = ("K8sJobMode", "SidecarMode")
OFFICIAL_IMAGE = re.compile(r"(?:.*/)?rayproject/ray(?:-ml)?:(?P<version>\d+\.\d+\.\d+)(?!\d)")
POD_PREFIX_LIMIT = 50
"""The length to which KubeRay cuts `<cluster>-<group>` before it adds `-worker-xxxxx`."""

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
            "is not a submission mode; KubeRay accepts it, starts the cluster, and never submits the job",
            f"Use one of {', '.join(MODES)}.",
        )


def names_the_dashboards_port(subject: Subject) -> Iterator[Violation]:
    ports = subject.head.container.at("ports")
    if ports.value and "dashboard" not in [port.at("name").text for port in ports.items()]:
        yield ports.breaks(
            "dashboard-port",
            "has no port with the name dashboard, so the operator cannot find the dashboard",
            "Add {name: dashboard, containerPort: 8265}, or remove all ports.",
        )


def says_which_ray_it_is(subject: Subject) -> Iterator[Violation]:
    ray = subject.cluster.at("rayVersion")
    if subject.groups and subject.ray not in (None, ray.text):
        yield ray.breaks(
            "ray-version",
            f"differs from the Ray version of the image, {subject.ray}",
            "Use the version of the image: the probes depend on it.",
        )
    for group in subject.groups:
        image = group.container.at("image")
        found = OFFICIAL_IMAGE.match(image.text)
        if found and ray.text and ray.text != found["version"]:
            yield ray.breaks(
                "ray-version",
                f"differs from the Ray version of the image of {group.name}, {found['version']}",
                "Use the version of the image: probes and tokens depend on it.",
                "warning",
            )
    if subject.groups and (ray.version is None or ray.version < (2, 53)):
        yield ray.breaks(
            "probes",
            "is below 2.53.0: the operator's probes then call wget, which slim images do not have",
            "Use an image with Ray 2.53.0 or newer, and set its version here.",
            "warning",
        )


def has_a_submitter_that_can_run(subject: Subject) -> Iterator[Violation]:
    template = subject.job.at("submitterPodTemplate")
    if subject.mode != "K8sJobMode" or not template.is_set:
        return
    policy = template.at("spec", "restartPolicy")
    if policy.text not in ("Never", "OnFailure"):
        yield policy.breaks(
            "submitter", "must be Never or OnFailure: the submitter is a Job", "Use Never."
        )
    if not template.at("spec", "containers").value:
        yield template.at("spec", "containers").breaks(
            "submitter", "must have a container", "Add the container that submits the job."
        )


def has_an_entrypoint_without_shell(subject: Subject) -> Iterator[Violation]:
    entrypoint = subject.job.at("entrypoint")
    if subject.mode not in SHELL_MODES or subject.job.at("submitterPodTemplate").is_set:
        return
    if found := shell_syntax(entrypoint.text.strip()):
        yield entrypoint.breaks(
            "entrypoint",
            f"contains {found}, which the shell of the submitter interprets before the entrypoint starts",
            "Move the program into a file of the image, or use HTTPMode.",
            "warning",
        )


def shell_syntax(text: str) -> str:
    """Return the first shell syntax in a command outside of quotes; "" if there is none."""
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
                "has no fixed tag: the image may change between two attempts",
                "Use a fixed tag or a digest.",
                "warning",
            )


def limits_its_memory(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        limit = group.container.at("resources", "limits", "memory")
        if group.container.is_set and not limit.is_set:
            yield limit.breaks(
                "memory-limit",
                f"without a limit, /dev/shm of {group.name} is unbounded, and Ray plans with the memory "
                "of the node",
                "Set the limit, and the request to the same amount.",
                "warning",
            )


def has_group_names_that_pods_keep(subject: Subject) -> Iterator[Violation]:
    cluster = f"{subject.metadata.at('name').text}{'-xxxxx' if subject.is_job else ''}"
    seen: dict[str, str] = {}
    names: set[str] = set()
    for group in subject.workers:
        name = group.place.at("groupName")
        if name.text in names:
            yield name.breaks(
                "group-name", "is used by two groups", "Give each group its own name."
            )
            continue
        names.add(name.text)
        if name.text != name.text.lower():
            yield name.breaks(
                "group-name",
                "has upper case letters, which KubeRay converts for the names of pods",
                "Use lower case.",
                "warning",
            )
        prefix = f"{cluster}-{name.text}"[:POD_PREFIX_LIMIT].lower()
        if prefix in seen:
            yield name.breaks(
                "group-name",
                f"is shortened to the same pod names as group {seen[prefix]}",
                "Shorten the names of the groups, or of the object.",
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
                f"is outside of minReplicas {least} and maxReplicas {most}, so KubeRay changes it",
                "Use a number between the two.",
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
                "start-parameter", "is ignored by KubeRay 1.6", "Remove it.", "warning"
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
