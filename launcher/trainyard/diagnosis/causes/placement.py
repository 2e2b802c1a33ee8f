"""Failures to schedule a pod on a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.failure import Evidence, Match, evidence, failure
from trainyard.diagnosis.snapshot import Object, Snapshot, name_of
from trainyard.diagnosis.symptoms import Symptom, find
from trainyard.planning.capacity.nodes import CONDITION_TAINT, GPU, tolerates
from trainyard.planning.nodes.affinity import selects, shown_terms

SCHEDULING = ("FailedScheduling", "Unschedulable")

OUR_TAINTS = r"node-role\.kubernetes\.io/(control-plane|master)"
"""Taints of control-plane nodes, which are not for runs: they are never the cause."""

NODES_SHOWN = 5


def _unplaced(snapshot: Snapshot, pattern: str) -> Symptom | None:
    return find(snapshot, pattern, SCHEDULING)


def _offers(node: Object) -> Object:
    return dict(node.get("status", {}).get("allocatable") or {})


def _gpu_wanted(symptom: Symptom) -> str:
    """Return the GPU resource of which the scheduler found too little; empty if there is none."""
    match = re.search(r"Insufficient ([\w.-]+/[\w.-]+)", symptom.text)
    return match[1].rstrip(".,") if match else ""


@failure(
    "gpu-resource-name",
    seen="FailedScheduling with `Insufficient`; what the nodes offer",
    remedy="Set gpuResource of the pool to a resource of the nodes ({offered}); if there is none, "
    "install the device plugin of the GPUs.",
)
def gpu_resource_name(snapshot: Snapshot) -> Match | None:
    """No node offers GPUs under the resource name of the pool."""
    symptom = _unplaced(snapshot, r"Insufficient [\w.-]+/")
    if symptom is None or snapshot.nodes is None:
        return None
    wanted = _gpu_wanted(symptom)
    offers = {
        key for node in snapshot.nodes for key, value in _offers(node).items() if value != "0"
    }
    if wanted in offers:
        return None
    offered = ", ".join(sorted(key for key in offers if GPU.fullmatch(key))) or "none"
    return Match(
        cause=f"the pods ask for {wanted}, which no node offers; the nodes offer as GPUs: {offered}",
        evidence=(
            symptom.evidence,
            evidence(f"{len(snapshot.nodes)} nodes", f"GPU resources: {offered}"),
        ),
        values={"offered": offered},
    )


@failure(
    "no-such-nodes",
    seen="FailedScheduling with `didn't match Pod's node affinity/selector`",
    remedy="Set nodeSelector of the pool, or of spot, in the platform's values to labels that its nodes have "
    "(`kubectl get nodes --show-labels`).",
)
def no_such_nodes(snapshot: Snapshot) -> Match | None:
    """No node has the labels that the pool selects."""
    symptom = _unplaced(snapshot, "didn't match Pod's node affinity/selector")
    if symptom is None:
        return None
    is_known = snapshot.nodes is not None and symptom.pod is not None
    # Each node gives one reason: without its labels, the others may be the ones that count.
    if is_known and _selected(snapshot, symptom):
        return None
    if not is_known and re.search("untolerated taint|Insufficient", symptom.text):
        return None
    labels = shown_terms((symptom.pod or {}).get("spec", {}))
    return Match(
        cause=f"no node has the labels that the pod selects{f': {labels}' if labels else ''}",
        evidence=(symptom.evidence,),
    )


@failure(
    "nodes-closed",
    seen="FailedScheduling with `untolerated taint`; taints node.kubernetes.io/... of the nodes",
    remedy="Look at `kubectl describe node`: bring the nodes back, uncordon them (`kubectl uncordon`), or "
    "free the memory or disk that they lack.",
)
def nodes_closed(snapshot: Snapshot) -> Match | None:
    """The nodes that fit the pods are down, cordoned, or short of memory or disk."""
    symptom = _unplaced(snapshot, "untolerated taint|were unschedulable")
    if symptom is None:
        return None
    nodes = _candidates(snapshot, symptom)
    keys = {name_of(node): {taint["key"] for taint in _taints(node, symptom)} for node in nodes}
    closed = [node for node in nodes if any(map(_is_condition, keys[name_of(node)]))]
    if not nodes or len(closed) < len(nodes):
        return None
    reasons = {key for node in closed for key in keys[name_of(node)] if _is_condition(key)}
    return Match(
        cause=f"every node that would fit is unavailable: {', '.join(sorted(reasons))}",
        evidence=(symptom.evidence, *_shown_taints(closed, symptom)),
    )


@failure(
    "taints",
    seen="FailedScheduling with `untolerated taint`",
    remedy="Add the taint to tolerations of the pool in the platform's values, or choose another pool "
    "(resources.pool).",
)
def taints(snapshot: Snapshot) -> Match | None:
    """The nodes that fit the pods have a taint that the pods do not tolerate."""
    symptom = _unplaced(snapshot, "untolerated taint")
    if symptom is None:
        return None
    marks = set(re.findall(r"untolerated taint\S* \{([^}]*)\}", symptom.text))
    if marks and all(re.search(OUR_TAINTS, mark) for mark in marks):
        return None
    nodes = _candidates(snapshot, symptom)
    tainted = [node for node in nodes if _taints(node, symptom)]
    is_short = "Insufficient" in symptom.text
    if (nodes and len(tainted) < len(nodes)) or (is_short and not tainted):
        return None
    which = f": {'; '.join(sorted(marks))}" if marks else ""
    return Match(
        cause=f"no node accepts the pod: nodes that would fit have a taint that it does not tolerate{which}",
        evidence=(symptom.evidence, *_shown_taints(tainted, symptom)),
    )


def _selected(snapshot: Snapshot, symptom: Symptom) -> list[Object]:
    """Return the nodes with the labels that the pod selects, as far as both are known."""
    spec = (symptom.pod or {}).get("spec", {})
    return [
        node
        for node in snapshot.nodes or ()
        if selects(spec, name_of(node), node["metadata"].get("labels") or {})
    ]


def _candidates(snapshot: Snapshot, symptom: Symptom) -> list[Object]:
    """Return the selected nodes that offer the GPU resource of the pod, or all if it requests no GPUs."""
    wanted = _gpu_wanted(symptom)
    nodes = _selected(snapshot, symptom)
    return [node for node in nodes if not wanted or _offers(node).get(wanted, "0") != "0"]


def _taints(node: Object, symptom: Symptom) -> list[Object]:
    """Return the taints of a node that keep the pod away, without those of control-plane nodes."""
    tolerations = (symptom.pod or {}).get("spec", {}).get("tolerations") or []
    return [
        taint
        for taint in node.get("spec", {}).get("taints") or []
        if taint.get("effect") != "PreferNoSchedule"
        and not re.search(OUR_TAINTS, taint["key"])
        and not any(tolerates(toleration, taint) for toleration in tolerations)
    ]


def _is_condition(key: str) -> bool:
    return key.startswith(CONDITION_TAINT)


def _shown_taints(nodes: list[Object], symptom: Symptom) -> Iterator[Evidence]:
    for node in nodes[:NODES_SHOWN]:
        for taint in _taints(node, symptom):
            value = f"={taint['value']}" if taint.get("value") else ""
            yield evidence(f"node {name_of(node)}", f"{taint['key']}{value}:{taint['effect']}")


@failure(
    "too-few-gpus",
    seen="FailedScheduling with `Insufficient` of the pool's GPU resource",
    remedy="Wait for another run to end (`trainyard gpus` shows which pods use the GPUs), ask for fewer "
    "(--gpus), or add nodes to the pool.",
)
def too_few_gpus(snapshot: Snapshot) -> Match | None:
    """No node has as many free GPUs as a pod asks for."""
    symptom = _unplaced(snapshot, r"Insufficient [\w.-]+/")
    if symptom is None:
        return None
    wanted = _gpu_wanted(symptom)
    asked = _asked(symptom, wanted)
    seen = [symptom.evidence]
    what = "none of which is free"
    if snapshot.nodes is not None:
        open_to_it = [node for node in _candidates(snapshot, symptom) if not _taints(node, symptom)]
        having = [int(_offers(node)[wanted]) for node in open_to_it]
        what = (
            f"the {len(having)} nodes that fit have {sum(having)} in total, "
            f"at most {max(having, default=0)} each"
        )
        if asked and having and asked > max(having):
            what += ": no node is large enough for such a pod"
        seen.append(evidence("nodes", what))
    return Match(cause=f"a pod asks for {asked or 'some'} {wanted}; {what}", evidence=tuple(seen))


def _asked(symptom: Symptom, resource: str) -> int:
    """Return how many of a resource the pod requests; 0 if the pod is gone."""
    if symptom.pod is None:
        return 0
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(resource, 0))
        for container in symptom.pod["spec"]["containers"]
    )


@failure(
    "too-little-cpu-or-memory",
    seen="FailedScheduling with `Insufficient cpu`, `memory` or `ephemeral-storage`",
    remedy="Reduce cpuRequest and memoryGib of the pool (or the head) to what a node has left beside "
    "its system pods, free some nodes, or add nodes.",
)
def too_little_cpu_or_memory(snapshot: Snapshot) -> Match | None:
    """No node has enough free CPU, memory or disk for a pod."""
    symptom = _unplaced(snapshot, "Insufficient (cpu|memory|ephemeral-storage)")
    if symptom is None:
        return None
    short = sorted(set(re.findall("Insufficient (cpu|memory|ephemeral-storage)", symptom.text)))
    asked = ""
    if symptom.pod is not None:
        requests = symptom.pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
        amounts = (f"{requests.get(key, '?')} {key}" for key in short)
        asked = f": it asks for {', '.join(amounts)}"
    return Match(
        cause=f"no node has enough {' and '.join(short)} free for a pod{asked}",
        evidence=(symptom.evidence,),
    )


@failure(
    "old-pods",
    seen="FailedScheduling with `anti-affinity rules`",
    remedy="Wait, if the old pods end by themselves. If their node is gone, they stay: delete its Node "
    "object, or add another node. job.separateAttempts: false in the platform's values lets the next "
    "submission share nodes with them.",
)
def old_pods(snapshot: Snapshot) -> Match | None:
    """The nodes that fit still hold pods of another attempt, and the platform keeps attempts apart."""
    symptom = _unplaced(snapshot, "anti-affinity rules")
    if symptom is None:
        return None
    return Match(
        cause="the nodes that fit still hold pods of another attempt of this run, and the platform keeps "
        "attempts apart (job.separateAttempts)",
        evidence=(symptom.evidence,),
    )


@failure(
    "unschedulable",
    seen="FailedScheduling for any other reason",
    remedy="Correct what the scheduler names for pod {pod}; it tries again by itself.",
)
def unschedulable(snapshot: Snapshot) -> Match | None:
    """The scheduler finds no node for a pod, for another reason."""
    symptom = _unplaced(snapshot, ".")
    if symptom is None:
        return None
    pod = name_of(symptom.pod) if symptom.pod else "that waits"
    return Match(
        cause=f"the scheduler finds no node for pod {pod}",
        evidence=(symptom.evidence,),
        values={"pod": pod},
    )
