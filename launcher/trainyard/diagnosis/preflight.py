"""What was seen of a cluster -> checks: whether a run can work there, before it takes GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainyard.diagnosis.activity import duration
from trainyard.diagnosis.catalogue import CHAPTERS, NODES, Finding
from trainyard.diagnosis.snapshot import is_ready, name_of
from trainyard.planning.capacity import nodes_of, room_reasons, rooms_for
from trainyard.planning.quota import over_quota
from trainyard.platform import Platform

Object = dict[str, Any]
State = Literal["ok", "failed", "not known"]
Right = tuple[str, str, str]
"""A kind, a part of it such as `log`, and what is done with it."""

RIGHTS: tuple[Right, ...] = (
    *(("RayJob", "", verb) for verb in ("create", "get", "list", "watch", "patch", "delete")),
    *(("RayCluster", "", verb) for verb in ("get", "list")),
    *(("Pod", "", verb) for verb in ("get", "list", "watch", "create", "delete")),
    ("Pod", "log", "get"),
    ("Pod", "exec", "create"),
    ("Pod", "portforward", "create"),
    ("Event", "", "list"),
    ("ConfigMap", "", "get"),
    ("PersistentVolumeClaim", "", "get"),
)  # fmt: skip
"""What the launcher does, as the chart's Role has it."""

TESTED = ((1, 29), (1, 34))
"""Kubernetes that the chart's objects are checked for."""

OPERATOR_S = 20.0
"""How long the operator may take to see a new RayJob; it takes less than a second."""

NEW_FIELDS = {"1.7": ("networkPolicy",), "1.6": ("preRunningDeadlineSeconds",)}
"""Fields of RayJobs that a version of KubeRay was the first to know, newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that must hold."""

    name: str
    state: State
    seen: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What became of the probe pod."""

    image: str
    storage: str
    refused: str = ""
    """Why the API server did not take it."""
    pod: Object | None = None
    claims: Mapping[str, Object | None] = field(default_factory=dict)
    finding: Finding | None = None
    """Why it did not start."""
    log: str = ""
    told: Object | None = None
    """What the program in it found."""
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """All that was looked at; None is what could not be read."""

    namespace: str
    version: Object | None = None
    silence: str = ""
    """Why the cluster does not answer."""
    missing_kinds: tuple[str, ...] = ()
    crd: Object | None = None
    operators: tuple[Object, ...] | None = None
    answered_s: float | None = None
    """How soon the operator gave a suspended RayJob a status; None where it was not tried."""
    is_silent: bool = False
    """Whether it never did."""
    rights: Mapping[Right, bool | None] = field(default_factory=dict)
    platform: Platform | None = None
    platform_problem: str = ""
    job: Object | None = None
    """The RayJob of the run that is asked for."""
    job_refused: str = ""
    """Why the API server would not take it; known where `job` is."""
    quotas: tuple[Object, ...] | None = None
    nodes: tuple[Object, ...] | None = None
    pods: tuple[Object, ...] | None = None
    """Of all namespaces."""
    probe: Probe | None = None


def checks(facts: ClusterFacts) -> list[Check]:
    """Each with ok, failed or not known."""
    if facts.silence:
        return [
            Check(
                name="cluster",
                state="failed",
                seen=facts.silence,
                remedy="Check KUBECONFIG and the network; `make cluster` starts one on this machine.",
            )
        ]
    return [
        _cluster(facts),
        _kuberay(facts),
        _operator(facts),
        _rights(facts),
        _platform(facts),
        *_run(facts),
        _quota(facts),
        _nodes(facts),
        *_of_probe(facts),
    ]


def _cluster(facts: ClusterFacts) -> Check:
    git = str((facts.version or {}).get("gitVersion", ""))
    match = re.match(r"v?(\d+)\.(\d+)", git)
    if match is None:
        return Check(name="cluster", state="not known", seen="it answers, and tells no version")
    first, last = (".".join(map(str, version)) for version in TESTED)
    if not TESTED[0] <= (int(match[1]), int(match[2])):
        return Check(
            name="cluster",
            state="failed",
            seen=f"Kubernetes {git}",
            remedy=f"Upgrade it: trainyard's objects are made for {first} to {last}.",
        )
    return Check(name="cluster", state="ok", seen=f"it answers: Kubernetes {git}")


def kuberay_of(crd: Object) -> str:
    """The version of KubeRay whose RayJob definition this is, as far as its fields tell: `1.6`."""
    (served,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    spec = served["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    known = spec.keys() | spec.get("rayClusterSpec", {}).get("properties", {}).keys()
    return next((version for version, new in NEW_FIELDS.items() if known >= set(new)), "older")


def _kuberay(facts: ClusterFacts) -> Check:
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
            seen="RayJob and RayCluster are known (their definitions may not be read)",
        )
    found = kuberay_of(facts.crd)
    needed = facts.platform.kuberay if facts.platform else "1.6"
    if found == "older" or found < needed:
        return Check(
            name=name,
            state="failed",
            seen=f"RayJob is that of KubeRay {'before 1.6' if found == 'older' else found}",
            remedy=f"Apply the CRDs of KubeRay {needed} (`kubectl apply --server-side`), then its "
            "operator: helm does not upgrade CRDs.",
        )
    return Check(name=name, state="ok", seen=f"RayJob is that of KubeRay {found}")


def _operator(facts: ClusterFacts) -> Check:
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
            remedy="Start it (`make operator`), and let it watch this namespace (its value watchNamespace).",
        )
    if facts.answered_s is None:
        return Check(name=name, state="not known", seen=seen or "no RayJob could be made to try it")
    answer = f"it gave a RayJob a status within {max(facts.answered_s, 1):.0f} s"
    return Check(name=name, state="ok", seen="; ".join([*versions, answer]))


def _rights(facts: ClusterFacts) -> Check:
    name = "rights"
    missing = [_right(right) for right, allowed in facts.rights.items() if allowed is False]
    if missing:
        return Check(
            name=name,
            state="failed",
            seen=f"you may not {', '.join(missing)}",
            remedy="Ask for the launcher's Role of the chart (launcher.rbac.subjects) in namespace "
            f"{facts.namespace}.",
        )
    if not facts.rights or None in facts.rights.values():
        return Check(name=name, state="not known", seen="the API server does not tell them")
    return Check(
        name=name,
        state="ok",
        seen=f"you may do all {len(facts.rights)} things that a launcher does",
    )


def _right(right: Right) -> str:
    kind, part, verb = right
    return f"{verb} {kind}{f'/{part}' if part else ''}"


def _platform(facts: ClusterFacts) -> Check:
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


def _run(facts: ClusterFacts) -> Iterator[Check]:
    if facts.job is None or facts.missing_kinds:
        return
    name = "RayJob"
    if facts.job_refused:
        yield Check(
            name=name,
            state="failed",
            seen=facts.job_refused,
            remedy="Mend what the message names: the API server would refuse the run.",
        )
    else:
        yield Check(
            name=name,
            state="ok",
            seen=f"the API server would take {facts.job['metadata']['name']} (dry run)",
        )


def _quota(facts: ClusterFacts) -> Check:
    name = "quota"
    if facts.quotas is None:
        return Check(name=name, state="not known", seen="ResourceQuotas may not be read")
    names = ", ".join(quota["metadata"]["name"] for quota in facts.quotas)
    if not names:
        return Check(name=name, state="ok", seen="the namespace has no ResourceQuota")
    if facts.job is None:
        return Check(
            name=name,
            state="not known",
            seen=f"ResourceQuota {names}",
            remedy="Name a run file: its pods are held against it.",
        )
    short = list(over_quota(facts.job, facts.quotas))
    if short:
        return Check(
            name=name,
            state="failed",
            seen="; ".join(short),
            remedy="Ask for less (--gpus, --workers), stop another run, or have the quota raised.",
        )
    return Check(name=name, state="ok", seen=f"the run fits into {names}")


def _nodes(facts: ClusterFacts) -> Check:
    name = "nodes"
    if facts.nodes is None:
        return Check(name=name, state="not known", seen="nodes may not be read")
    if facts.job is None:
        return Check(
            name=name,
            state="not known",
            seen=_offers(facts),
            remedy="Name a run file: its pods are put on the nodes in thought.",
        )
    rooms = rooms_for(facts.job, nodes_of(facts.nodes, facts.pods or ()))
    said = "; ".join(f"{row.name}: {row.value}, {row.why}" for row in room_reasons(rooms))
    if any(not room.is_enough for room in rooms):
        return Check(
            name=name,
            state="failed",
            seen=said,
            remedy="Ask for less (--gpus, --workers) or for another pool, or correct the pool's numbers in "
            "the platform's values. Nodes that an autoscaler could add are not counted.",
        )
    if any(room.free < room.need.fewest for room in rooms):
        return Check(
            name=name,
            state="not known",
            seen=said,
            remedy="The run waits until there is room: `trainyard gpus` shows who holds what.",
        )
    if facts.pods is None:
        said += "; what runs there may not be read"
    return Check(name=name, state="ok", seen=said)


def _offers(facts: ClusterFacts) -> str:
    """What the nodes have of each pool's GPUs."""
    nodes = facts.nodes or ()
    parts = [f"{len(nodes)} nodes"]
    for pool in facts.platform.pools if facts.platform else ():
        if pool.gpu_resource is not None:
            counts = [
                int(node.get("status", {}).get("allocatable", {}).get(pool.gpu_resource, "0"))
                for node in nodes
            ]
            having = [count for count in counts if count]
            parts.append(f"pool {pool.name}: {sum(having)} {pool.gpu_resource} on {len(having)}")
    return "; ".join(parts)


# The probe pod.

CLAIM_FAILURES = (
    "claim-missing", "wrong-storage-class", "access-mode", "claim-unbound", "mount-failed",
)  # fmt: skip


NODE_FAILURES = tuple(
    known.name for title, chapter in CHAPTERS if title == NODES for known in chapter
)


def _of_probe(facts: ClusterFacts) -> Iterator[Check]:
    probe = facts.probe
    names = ("Pod Security", "claim", "node", "image", "programs", "storage", "Ray version")
    if probe is None:
        yield from (
            Check(name=name, state="not known", seen="no probe pod was made") for name in names
        )
        return
    if probe.refused:
        yield Check(
            name="Pod Security",
            state="failed",
            seen=probe.refused,
            remedy="Mend what the message names: the pods of a run are refused for the same reason.",
        )
        yield from (
            Check(name=name, state="not known", seen="no pod, no probe") for name in names[1:]
        )
        return
    yield Check(name="Pod Security", state="ok", seen="the API server took the probe pod")
    yield _claim(probe)
    yield _node(probe)
    yield _image(probe)
    yield from _of_program(facts, probe, probe.told)


def _claim(probe: Probe) -> Check:
    if probe.finding is not None and probe.finding.failure in CLAIM_FAILURES:
        return Check(
            name="claim", state="failed", seen=probe.finding.cause, remedy=probe.finding.remedy
        )
    if not probe.claims:
        return Check(name="claim", state="ok", seen=f"none: the storage is {probe.storage}")
    bound = [
        f"{name} is {((claim or {}).get('status') or {}).get('phase', 'missing')}"
        for name, claim in probe.claims.items()
    ]
    is_bound = all(text.endswith(" is Bound") for text in bound)
    return Check(name="claim", state="ok" if is_bound else "not known", seen=", ".join(bound))


def _node(probe: Probe) -> Check:
    """Where the probe pod went; a head of the run has the same node selector and tolerations."""
    name = "node"
    finding = probe.finding
    if finding is not None and finding.failure in NODE_FAILURES:
        return Check(name=name, state="failed", seen=finding.cause, remedy=finding.remedy)
    node = ((probe.pod or {}).get("spec") or {}).get("nodeName")
    if node:
        return Check(name=name, state="ok", seen=f"{node} took the probe pod")
    return Check(name=name, state="not known", seen="the probe pod did not come so far")


def _image(probe: Probe) -> Check:
    finding = probe.finding
    if finding is not None and finding.failure in (*CLAIM_FAILURES, *NODE_FAILURES):
        return Check(name="image", state="not known", seen="the probe pod did not come so far")
    if finding is not None:
        return Check(name="image", state="failed", seen=finding.cause, remedy=finding.remedy)
    if probe.told is None and not probe.log:
        return Check(
            name="image",
            state="failed",
            seen=f"the probe pod has not started within {duration(probe.waited_s)}",
            remedy="See `kubectl describe pod` while `trainyard preflight` runs.",
        )
    return Check(name="image", state="ok", seen=f"{probe.image} was pulled and starts")


def _of_program(facts: ClusterFacts, probe: Probe, told: Object | None) -> Iterator[Check]:
    if told is None:
        state: State = "failed" if probe.log else "not known"
        seen = " ".join(probe.log.split())[-300:] or "the probe pod did not come so far"
        remedy = (
            "Build the image from train_image/ of this version (`make image`)." if probe.log else ""
        )
        yield Check(name="programs", state=state, seen=seen, remedy=remedy)
        for name in ("storage", "Ray version"):
            yield Check(name=name, state="not known", seen="the probe did not come so far")
        return
    missing = [name for name, path in told["programs"].items() if path is None]
    yield Check(
        name="programs",
        state="failed" if missing else "ok",
        seen=f"the image has no {', '.join(missing)}" if missing else ", ".join(told["programs"]),
        remedy="Put them on the image's PATH: build on train_image/Dockerfile." if missing else "",
    )
    broken = {step: said for step, said in told["storage"].items() if said != "ok"}
    yield Check(
        name="storage",
        state="failed" if broken else "ok",
        seen="; ".join(f"{step}: {said}" for step, said in broken.items())
        or f"{probe.storage}: {', '.join(told['storage'])}",
        remedy="User 1000 (or the Secret's keys) must be able to list, read, write and delete there."
        if broken
        else "",
    )
    found, wanted = told["versions"].get("ray"), facts.platform and facts.platform.ray_version
    is_equal = found == wanted
    yield Check(
        name="Ray version",
        state="ok" if is_equal else "failed",
        seen=f"{found or 'none'} in the image, {wanted} in the platform",
        remedy=""
        if is_equal
        else "Set rayVersion of the platform to the image's Ray, or use the other image.",
    )
