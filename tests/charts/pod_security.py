"""The rules of Kubernetes' Pod Security profile "restricted" (Linux), for a pod's spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
ALLOWED_SECCOMP = {"RuntimeDefault", "Localhost"}
ALLOWED_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
}  # fmt: skip


def violations(spec: dict[str, Any]) -> list[str]:
    """What admission would refuse; empty when the pod may run."""
    pod = spec.get("securityContext", {})
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [
        f"volume {volume['name']}"
        for volume in spec.get("volumes", [])
        if not set(volume) - {"name"} <= ALLOWED_VOLUMES
    ]
    found += [
        f"sysctl {one['name']}"
        for one in pod.get("sysctls", [])
        if one["name"] not in ALLOWED_SYSCTLS
    ]
    for section in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(section, []):
            found += [f"{container['name']}: {what}" for what in _of_container(container, pod)]
    return found


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    # A container's own setting wins over its pod's.
    effective = {**pod, **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities.drop"
    if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if effective.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if effective.get("runAsUser") == 0:
        yield "runAsUser"
    if effective.get("seccompProfile", {}).get("type") not in ALLOWED_SECCOMP:
        yield "seccompProfile"
    if effective.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "appArmorProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
