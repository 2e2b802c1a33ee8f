"""Pods that no node takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.complaints import Complaint, find
from trainyard.diagnosis.failure import Evidence, Sign, evidence, failure
from trainyard.diagnosis.snapshot import Object, Scene, name_of
from trainyard.planning.capacity import CONDITION_TAINT, GPU, tolerates

SCHEDULING = ("FailedScheduling", "Unschedulable")

OUR_TAINTS = r"node-role\.kubernetes\.io/(control-plane|master)"
"""Taints of nodes that are not meant for runs: they are never the cause."""

NODES_SHOWN = 5


def _unplaced(scene: Scene, pattern: str) -> Complaint | None:
    return find(scene, pattern, SCHEDULING)


def _offers(node: Object) -> Object:
    return dict(node.get("status", {}).get("allocatable") or {})


def _gpu_wanted(complaint: Complaint) -> str:
    """The GPU resource of which there is too little, as the scheduler names it."""
    match = re.search(r"Insufficient ([\w.-]+/[\w.-]+)", complaint.text)
    return match[1].rstrip(".,") if match else ""


@failure(
    "gpu-resource-name",
    seen="FailedScheduling with `Insufficient`; what the nodes offer",
    remedy="Set gpuResource of the pool to what the nodes offer ({offered}); if that is nothing, "
    "install the device plugin of the GPUs.",
)
def gpu_resource_name(scene: Scene) -> Sign | None:
    """No node offers GPUs under the name that the pool gives them."""
    complaint = _unplaced(scene, r"Insufficient [\w.-]+/")
    if complaint is None or scene.nodes is None:
        return None
    wanted = _gpu_wanted(complaint)
    offers = {key for node in scene.nodes for key, value in _offers(node).items() if value != "0"}
    if wanted in offers:
        return None
    offered = ", ".join(sorted(key for key in offers if GPU.fullmatch(key))) or "none"
    return Sign(
        cause=f"the pods ask for {wanted}, which no node offers; the nodes offer as GPUs: {offered}",
        evidence=(
            complaint.evidence,
            evidence(f"{len(scene.nodes)} nodes", f"GPU resources: {offered}"),
        ),
        values={"offered": offered},
    )


@failure(
    "no-such-nodes",
    seen="FailedScheduling with `didn't match Pod's node affinity/selector`",
    remedy="Set nodeSelector of the pool in the platform's values to labels that its nodes have "
    "(`kubectl get nodes --show-labels`).",
)
def no_such_nodes(scene: Scene) -> Sign | None:
    """No node has the labels that the pool selects."""
    complaint = _unplaced(scene, "didn't match Pod's node affinity/selector")
    if complaint is None:
        return None
    is_known = scene.nodes is not None and complaint.pod is not None
    # Each node gives one reason: without its labels, the others may be the ones that count.
    if is_known and _selected(scene, complaint):
        return None
    if not is_known and re.search("untolerated taint|Insufficient", complaint.text):
        return None
    selector = (complaint.pod or {}).get("spec", {}).get("nodeSelector") or {}
    labels = ", ".join(f"{key}={value}" for key, value in selector.items())
    return Sign(
        cause=f"no node has the labels that the pod selects{f': {labels}' if labels else ''}",
        evidence=(complaint.evidence,),
    )


@failure(
    "nodes-closed",
    seen="FailedScheduling with `untolerated taint`; taints node.kubernetes.io/... of the nodes",
    remedy="See `kubectl describe node`: bring the nodes back, uncordon them (`kubectl uncordon`), or free "
    "what they are short of.",
)
def nodes_closed(scene: Scene) -> Sign | None:
    """The nodes that could take the pods are down, cordoned, or short of memory or disk."""
    complaint = _unplaced(scene, "untolerated taint|were unschedulable")
    if complaint is None:
        return None
    nodes = _candidates(scene, complaint)
    keys = {name_of(node): {taint["key"] for taint in _taints(node, complaint)} for node in nodes}
    closed = [node for node in nodes if any(map(_is_condition, keys[name_of(node)]))]
    if not nodes or len(closed) < len(nodes):
        return None
    reasons = {key for node in closed for key in keys[name_of(node)] if _is_condition(key)}
    return Sign(
        cause=f"every node that would fit is closed: {', '.join(sorted(reasons))}",
        evidence=(complaint.evidence, *_shown_taints(closed, complaint)),
    )


@failure(
    "taints",
    seen="FailedScheduling with `untolerated taint`",
    remedy="Add the taint to tolerations of the pool in the platform's values, or choose another pool "
    "(resources.pool).",
)
def taints(scene: Scene) -> Sign | None:
    """The nodes that could take the pods have a taint that these do not tolerate."""
    complaint = _unplaced(scene, "untolerated taint")
    if complaint is None:
        return None
    marks = set(re.findall(r"untolerated taint\S* \{([^}]*)\}", complaint.text))
    if marks and all(re.search(OUR_TAINTS, mark) for mark in marks):
        return None
    nodes = _candidates(scene, complaint)
    tainted = [node for node in nodes if _taints(node, complaint)]
    is_short = "Insufficient" in complaint.text
    if (nodes and len(tainted) < len(nodes)) or (is_short and not tainted):
        return None
    which = f": {'; '.join(sorted(marks))}" if marks else ""
    return Sign(
        cause=f"no node takes the pod: nodes that would fit have a taint that it does not tolerate{which}",
        evidence=(complaint.evidence, *_shown_taints(tainted, complaint)),
    )


def _selected(scene: Scene, complaint: Complaint) -> list[Object]:
    """The nodes with the labels that the pod selects, as far as both are known."""
    selector = (complaint.pod or {}).get("spec", {}).get("nodeSelector") or {}
    return [
        node
        for node in scene.nodes or ()
        if selector.items() <= (node["metadata"].get("labels") or {}).items()
    ]


def _candidates(scene: Scene, complaint: Complaint) -> list[Object]:
    """Of those the ones that offer the GPUs which the pod asks for, or all where it asks for none."""
    wanted = _gpu_wanted(complaint)
    nodes = _selected(scene, complaint)
    return [node for node in nodes if not wanted or _offers(node).get(wanted, "0") != "0"]


def _taints(node: Object, complaint: Complaint) -> list[Object]:
    """Those that keep the pod away; not those of nodes that are no place for runs."""
    tolerations = (complaint.pod or {}).get("spec", {}).get("tolerations") or []
    return [
        taint
        for taint in node.get("spec", {}).get("taints") or []
        if taint.get("effect") != "PreferNoSchedule"
        and not re.search(OUR_TAINTS, taint["key"])
        and not any(tolerates(toleration, taint) for toleration in tolerations)
    ]


def _is_condition(key: str) -> bool:
    return key.startswith(CONDITION_TAINT)


def _shown_taints(nodes: list[Object], complaint: Complaint) -> Iterator[Evidence]:
    for node in nodes[:NODES_SHOWN]:
        for taint in _taints(node, complaint):
            value = f"={taint['value']}" if taint.get("value") else ""
            yield evidence(f"node {name_of(node)}", f"{taint['key']}{value}:{taint['effect']}")


@failure(
    "too-few-gpus",
    seen="FailedScheduling with `Insufficient` of the pool's GPU resource",
    remedy="Wait for another run to end (`trainyard gpus` shows who holds what), ask for fewer "
    "(--gpus), or add nodes to the pool.",
)
def too_few_gpus(scene: Scene) -> Sign | None:
    """No node has as many free GPUs as a pod asks for."""
    complaint = _unplaced(scene, r"Insufficient [\w.-]+/")
    if complaint is None:
        return None
    wanted = _gpu_wanted(complaint)
    asked = _asked(complaint, wanted)
    seen = [complaint.evidence]
    what = "of which none is free"
    if scene.nodes is not None:
        open_to_it = [
            node for node in _candidates(scene, complaint) if not _taints(node, complaint)
        ]
        having = [int(_offers(node)[wanted]) for node in open_to_it]
        what = (
            f"{len(having)} nodes that it may use have {sum(having)} of them in all, "
            f"at most {max(having, default=0)} each"
        )
        if asked and having and asked > max(having):
            what += ": no node can ever take such a pod"
        seen.append(evidence("nodes", what))
    return Sign(cause=f"a pod asks for {asked or 'some'} {wanted}; {what}", evidence=tuple(seen))


def _asked(complaint: Complaint, resource: str) -> int:
    """How many of a resource the pod wants; 0 if the pod is not there."""
    if complaint.pod is None:
        return 0
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(resource, 0))
        for container in complaint.pod["spec"]["containers"]
    )


@failure(
    "too-little-cpu-or-memory",
    seen="FailedScheduling with `Insufficient cpu`, `memory` or `ephemeral-storage`",
    remedy="Make cpuRequest and memoryGib of the pool (or the head) what a node has left beside "
    "its system pods, free some nodes, or add nodes.",
)
def too_little_cpu_or_memory(scene: Scene) -> Sign | None:
    """No node has enough free CPU, memory or disk for a pod."""
    complaint = _unplaced(scene, "Insufficient (cpu|memory|ephemeral-storage)")
    if complaint is None:
        return None
    short = sorted(set(re.findall("Insufficient (cpu|memory|ephemeral-storage)", complaint.text)))
    asked = ""
    if complaint.pod is not None:
        requests = complaint.pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
        amounts = (f"{requests.get(key, '?')} {key}" for key in short)
        asked = f": it asks for {', '.join(amounts)}"
    return Sign(
        cause=f"no node has enough {' and '.join(short)} free for a pod{asked}",
        evidence=(complaint.evidence,),
    )


@failure(
    "old-pods",
    seen="FailedScheduling with `anti-affinity rules`",
    remedy="Nothing, if the old pods end by themselves. A node that is gone keeps them: delete its Node "
    "object, or add another node. job.separateAttempts: false in the platform's values lets the next "
    "submission share nodes with them.",
)
def old_pods(scene: Scene) -> Sign | None:
    """The nodes that fit still hold pods of another attempt, and the platform keeps attempts apart."""
    complaint = _unplaced(scene, "anti-affinity rules")
    if complaint is None:
        return None
    return Sign(
        cause="the nodes that fit still hold pods of another attempt of this run, and the platform keeps "
        "attempts apart (job.separateAttempts)",
        evidence=(complaint.evidence,),
    )


@failure(
    "unschedulable",
    seen="FailedScheduling for any other reason",
    remedy="Mend what the scheduler names for pod {pod}; it tries again by itself.",
)
def unschedulable(scene: Scene) -> Sign | None:
    """The scheduler finds no node for a pod, for a reason that is none of the above."""
    complaint = _unplaced(scene, ".")
    if complaint is None:
        return None
    pod = name_of(complaint.pod) if complaint.pod else "that waits"
    return Sign(
        cause=f"the scheduler finds no node for pod {pod}",
        evidence=(complaint.evidence,),
        values={"pod": pod},
    )
