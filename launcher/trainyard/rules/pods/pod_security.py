"""Rules of Kubernetes' Pod Security Standards, applied to the pod templates of an object.

A namespace decides by its label `pod-security.kubernetes.io/enforce` whether it refuses a pod that violates
the profile `baseline` or `restricted`. The label is not in the object, so each violation is a warning. The
profiles are those of Kubernetes 1.34 for Linux; tests compare the rules with Kubernetes' own examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.pods.pod_validation import CONTAINER_LISTS
from trainyard.rules.subject import Subject

NAMES = (BASELINE, RESTRICTED) = ("pod-security-baseline", "pod-security-restricted")
"""The names of the rules. Whatever violates `baseline` violates `restricted` too and is reported once."""

BASELINE_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
RESTRICTED_CAPABILITIES = {"NET_BIND_SERVICE"}
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem",
}  # fmt: skip
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
PROFILE_TYPES = ("RuntimeDefault", "Localhost")
"""The types of seccomp and AppArmor profiles that confine a container."""
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
VOLUME_TYPES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected",
    "secret",
}  # fmt: skip
HANDLERS = (
    ("livenessProbe",), ("readinessProbe",), ("startupProbe",),
    ("lifecycle", "postStart"), ("lifecycle", "preStop"),
)  # fmt: skip
"""Where a container names a host to which the kubelet connects."""


def meets_the_baseline_profile(subject: Subject) -> Iterator[Violation]:
    for template, containers in _templates(subject):
        yield from baseline(template, containers)


def meets_the_restricted_profile(subject: Subject) -> Iterator[Violation]:
    for template, containers in _templates(subject):
        yield from restricted(template, containers)


def containers_of(template: FieldPath) -> list[FieldPath]:
    """Return all containers of a pod template."""
    return [one for key in CONTAINER_LISTS for one in template.at("spec", key).items()]


def baseline(template: FieldPath, containers: list[FieldPath]) -> Iterator[Violation]:
    """Yield what the profile `baseline` forbids in a pod template with these containers."""
    pod = template.at("spec")
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.at(key).is_true:
            yield _baseline(pod.at(key), "Remove it.")
    for volume in pod.at("volumes").items():
        if volume.at("hostPath").is_set:
            yield _baseline(volume.at("hostPath"), "Use another kind of volume.")
    for sysctl in pod.at("securityContext", "sysctls").items():
        if sysctl.at("name").text not in SYSCTLS:
            yield _baseline(sysctl.at("name"), "Remove it.")
    for key, profile in template.at("metadata", "annotations").entries():
        is_confined = profile.text in ("", "runtime/default") or profile.text.startswith(
            "localhost/"
        )
        if key.startswith(APPARMOR_ANNOTATION) and not is_confined:
            yield _baseline(profile, "Use runtime/default.")
    for place in (pod, *containers):
        yield from _baseline_context(place.at("securityContext"))
    for container in containers:
        yield from _baseline_container(container)


def _baseline_context(security: FieldPath) -> Iterator[Violation]:
    """Yield what `baseline` forbids in the securityContext of a pod or of a container."""
    host_process = security.at("windowsOptions", "hostProcess")
    if host_process.is_true:
        yield _baseline(host_process, "Remove it.")
    options = security.at("seLinuxOptions")
    if options.at("type").text not in SELINUX_TYPES:
        yield _baseline(options.at("type"), "Use container_t, or remove it.")
    for key in ("user", "role"):
        if options.at(key).text:
            yield _baseline(options.at(key), "Remove it.")
    apparmor, seccomp = (security.at(key, "type") for key in ("appArmorProfile", "seccompProfile"))
    if security.at("appArmorProfile").is_set and apparmor.text not in PROFILE_TYPES:
        yield _baseline(apparmor, f"Use {' or '.join(PROFILE_TYPES)}.")
    if seccomp.text == "Unconfined":
        yield _baseline(seccomp, f"Use {' or '.join(PROFILE_TYPES)}.")


def _baseline_container(container: FieldPath) -> Iterator[Violation]:
    """Yield what `baseline` forbids in a container alone."""
    security = container.at("securityContext")
    if security.at("privileged").is_true:
        yield _baseline(security.at("privileged"), "Set it to false.")
    for capability in _added(security):
        if capability.text not in BASELINE_CAPABILITIES:
            yield _baseline(capability, "Remove it.")
    if security.at("procMount").text not in ("", "Default"):
        yield _baseline(security.at("procMount"), "Remove it.")
    for port in container.at("ports").items():
        if port.at("hostPort").number:
            yield _baseline(port.at("hostPort"), "Remove it.")
    for handler in HANDLERS:
        for way in ("httpGet", "tcpSocket"):
            host = container.at(*handler, way, "host")
            if host.text:
                yield _baseline(host, "Remove it: the kubelet then uses the address of the pod.")


def restricted(template: FieldPath, containers: list[FieldPath]) -> Iterator[Violation]:
    """Yield what the profile `restricted` forbids beyond `baseline`, in a template with these containers."""
    pod = template.at("spec")
    for volume in pod.at("volumes").items():
        for key, source in volume.entries():
            if key not in (*VOLUME_TYPES, "name", "hostPath") and source.is_set:
                yield _restricted(source, f"Use one of {', '.join(sorted(VOLUME_TYPES))}.")
    for container in containers:
        security = container.at("securityContext")
        if security.at("allowPrivilegeEscalation").value is not False:
            yield _restricted(security.at("allowPrivilegeEscalation"), "Set it to false.")
        if "ALL" not in _texts(security.at("capabilities", "drop")):
            yield _restricted(security.at("capabilities", "drop"), "Set it to [ALL].")
        for capability in _added(security):
            if capability.text in BASELINE_CAPABILITIES - RESTRICTED_CAPABILITIES:
                yield _restricted(capability, "Remove it.")
    for place in (pod, *containers):
        user = place.at("securityContext", "runAsUser")
        if user.number == 0:
            yield _restricted(user, "Use another user than 0, or remove it.")
    yield from _confines(
        pod, containers, "runAsNonRoot", lambda value: value is True, "Set it to true."
    )
    yield from _confines(
        pod, containers, "seccompProfile", _is_seccomp, "Set {type: RuntimeDefault}."
    )


def _confines(
    pod: FieldPath,
    containers: list[FieldPath],
    key: str,
    is_good: Callable[[Any], bool],
    remedy: str,
) -> Iterator[Violation]:
    """Yield where a field of the securityContext is wrong: of the pod, or of a container, which overrides it.

    If a container has it neither itself nor from its pod, the field of the pod is named.
    """
    of_pod = pod.at("securityContext", key)
    own = [container.at("securityContext", key) for container in containers]
    is_missing = not of_pod.is_set and any(not field.is_set for field in own)
    for field in (of_pod, *own):
        if field.is_set and not is_good(field.value):
            yield _restricted(field, remedy)
    if is_missing:
        yield _restricted(of_pod, remedy)


def _is_seccomp(profile: Any) -> bool:
    """Whether a seccomp profile satisfies `restricted`, or is reported as a violation of `baseline`."""
    return FieldPath("", profile).at("type").text in (*PROFILE_TYPES, "Unconfined")


def _added(security: FieldPath) -> Iterator[FieldPath]:
    added = security.at("capabilities", "add")
    for index, name in enumerate(added.value if isinstance(added.value, list) else ()):
        if isinstance(name, str):
            yield FieldPath(f"{added.path}[{index}]", name)


def _texts(place: FieldPath) -> list[str]:
    values = place.value if isinstance(place.value, list) else ()
    return [value for value in values if isinstance(value, str)]


def _baseline(place: FieldPath, remedy: str) -> Violation:
    problem = 'violates Pod Security "baseline": a namespace that enforces it or "restricted" refuses the pod'
    return place.breaks(BASELINE, problem, remedy, "warning")


def _restricted(place: FieldPath, remedy: str) -> Violation:
    problem = 'violates Pod Security "restricted": a namespace that enforces it refuses the pod'
    return place.breaks(RESTRICTED, problem, remedy, "warning")


def _templates(subject: Subject) -> Iterator[tuple[FieldPath, list[FieldPath]]]:
    """Yield each pod template with its containers, for a head also the autoscaler that KubeRay adds."""
    for group in subject.groups:
        template = group.place.at("template")
        containers = containers_of(template)
        if group.is_head and subject.autoscales:
            containers.append(subject.cluster.at("autoscalerOptions"))
        yield template, containers
    submitter = subject.job.at("submitterPodTemplate")
    yield submitter, containers_of(submitter)


RULES = (meets_the_baseline_profile, meets_the_restricted_profile)
