"""Checks of the installation: Kubernetes, KubeRay, its operator, the user's rights and the platform."""

from __future__ import annotations

import re

from trainyard.diagnosis.preflight.facts import OPERATOR_S, Check, ClusterFacts, Object, Right
from trainyard.diagnosis.snapshot import is_ready, name_of

TESTED = ((1, 29), (1, 34))
"""The oldest and the newest Kubernetes version that the chart's objects are checked for."""

NEW_FIELDS = {"1.7": ("networkPolicy",), "1.6": ("preRunningDeadlineSeconds",)}
"""For each KubeRay version, newest first, fields of RayJobs that it introduced."""


def check_cluster(facts: ClusterFacts) -> Check:
    """Check that the API server answers with a supported version of Kubernetes."""
    git = str((facts.version or {}).get("gitVersion", ""))
    match = re.match(r"v?(\d+)\.(\d+)", git)
    if match is None:
        return Check(name="cluster", state="not known", seen="it answers without a version")
    first, last = (".".join(map(str, version)) for version in TESTED)
    if not TESTED[0] <= (int(match[1]), int(match[2])):
        return Check(
            name="cluster",
            state="failed",
            seen=f"Kubernetes {git}",
            remedy=f"Upgrade Kubernetes: trainyard is tested with {first} to {last}.",
        )
    return Check(name="cluster", state="ok", seen=f"it answers: Kubernetes {git}")


def kuberay_of(crd: Object) -> str:
    """Return the KubeRay version of a RayJob CRD, such as `1.6`, as far as its fields show it."""
    (served,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    spec = served["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    known = spec.keys() | spec.get("rayClusterSpec", {}).get("properties", {}).keys()
    return next((version for version, new in NEW_FIELDS.items() if known >= set(new)), "older")


def check_kuberay(facts: ClusterFacts) -> Check:
    """Check that KubeRay's CRDs are installed, in the version that the platform needs."""
    name = "KubeRay CRDs"
    if facts.missing_kinds:
        return Check(
            name=name,
            state="failed",
            seen=f"the cluster does not know {' and '.join(facts.missing_kinds)}",
            remedy="Install the KubeRay operator with its CRDs: `make operator`.",
        )
    if facts.crd is None:
        return Check(
            name=name,
            state="ok",
            seen="RayJob and RayCluster are known (no permission to read their CRDs)",
        )
    found = kuberay_of(facts.crd)
    needed = facts.platform.kuberay if facts.platform else "1.6"
    if found == "older" or found < needed:
        return Check(
            name=name,
            state="failed",
            seen=f"the RayJob CRD is of KubeRay {'before 1.6' if found == 'older' else found}",
            remedy=f"Apply the CRDs of KubeRay {needed} (`kubectl apply --server-side`), then its "
            "operator: helm does not upgrade CRDs.",
        )
    return Check(name=name, state="ok", seen=f"the RayJob CRD is of KubeRay {found}")


def check_operator(facts: ClusterFacts) -> Check:
    """Check that the KubeRay operator runs in the right version, and handles RayJobs of this namespace."""
    name = "operator"
    needed = facts.platform.kuberay if facts.platform else "1.6"
    versions = []
    for pod in facts.operators or ():
        version = str(pod["spec"]["containers"][0].get("image", "")).rpartition(":")[2]
        state = "ready" if is_ready(pod) else "not ready"
        versions.append(
            f"pod {pod['metadata'].get('namespace')}/{name_of(pod)}, {version}, {state}"
        )
        number = re.fullmatch(r"v?(\d+)\.(\d+)\S*", version)
        if number and f"{number[1]}.{number[2]}" != needed:
            return Check(
                name=name,
                state="failed",
                seen=versions[-1],
                remedy=f'The platform says kuberay: "{needed}". Upgrade the operator, or set that value.',
            )
    seen = "; ".join(versions)
    if facts.is_silent:
        return Check(
            name=name,
            state="failed",
            seen="; ".join([*versions, f"a RayJob got no status within {OPERATOR_S:g} s"]),
            remedy="Start the operator (`make operator`), and make it watch this namespace (its value "
            "watchNamespace).",
        )
    if facts.answered_s is None:
        return Check(
            name=name, state="not known", seen=seen or "no RayJob could be created to test it"
        )
    answer = f"it gave a RayJob a status within {max(facts.answered_s, 1):.0f} s"
    return Check(name=name, state="ok", seen="; ".join([*versions, answer]))


def check_rights(facts: ClusterFacts) -> Check:
    """Check that the user has the permissions of the launcher's Role."""
    name = "rights"
    missing = [_right_text(right) for right, allowed in facts.rights.items() if allowed is False]
    if missing:
        return Check(
            name=name,
            state="failed",
            seen=f"you may not {', '.join(missing)}",
            remedy="Ask for the launcher's Role of the chart (launcher.rbac.subjects) in namespace "
            f"{facts.namespace}.",
        )
    if not facts.rights or None in facts.rights.values():
        return Check(name=name, state="not known", seen="the API server does not report them")
    return Check(
        name=name,
        state="ok",
        seen=f"you have all {len(facts.rights)} permissions that the launcher needs",
    )


def _right_text(right: Right) -> str:
    kind, subresource, verb = right
    return f"{verb} {kind}{f'/{subresource}' if subresource else ''}"


def check_platform(facts: ClusterFacts) -> Check:
    """Check that the platform of the namespace can be read."""
    name = "platform"
    if facts.platform is None:
        return Check(
            name=name,
            state="failed",
            seen=facts.platform_problem,
            remedy=f"Install it with `make platform NAMESPACE={facts.namespace}`, or name one with "
            "--platform FILE.",
        )
    pools = ", ".join(pool.name for pool in facts.platform.pools)
    return Check(
        name=name,
        state="ok",
        seen=f"pools {pools}; storage {facts.platform.storage.path}; KubeRay {facts.platform.kuberay}, "
        f"Ray {facts.platform.ray_version}",
    )
