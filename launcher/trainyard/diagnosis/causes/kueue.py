"""Failures of runs that wait in a queue of Kueue, and of runs that are suspended with or without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainyard.diagnosis.activity import duration
from trainyard.diagnosis.failure import Match, evidence, failure
from trainyard.diagnosis.snapshot import Object, Snapshot, name_of
from trainyard.labels import QUEUE_LABELS
from trainyard.planning.capacity.nodes import count_fitting_pods
from trainyard.planning.nodes.affinity import selects
from trainyard.quantities import amounts_of, requests_of
from trainyard.submission.queue_wait import (
    FAILED_TO_START,
    exceeds_all_quota,
    is_deactivated,
    is_finished,
    queue_of,
    required_topologies,
    shortened,
)
from trainyard.submission.status import condition

QUEUE_LABEL = QUEUE_LABELS["kueue"]
QUEUE_KIND = "LocalQueue"


def _queue(snapshot: Snapshot) -> str:
    """Return the Kueue queue of the RayJob; empty if it has none."""
    return "" if snapshot.job is None else queue_of(snapshot.job)


def _queue_conditions(snapshot: Snapshot) -> Iterator[tuple[str, Object]]:
    for thing in (snapshot.local_queue, snapshot.workload):
        if thing is not None:
            name = f"{thing.get('kind', 'Kueue object')} {name_of(thing)}"
            for found in thing.get("status", {}).get("conditions") or []:
                yield name, found


@failure(
    "kueue-inactive",
    seen="a LocalQueue that is missing or not Active, a Workload `Inadmissible`",
    remedy="Name a queue that exists (`kubectl get localqueues -n {namespace}`), or repair or resume its "
    "ClusterQueue (`kubectl describe clusterqueue`).",
)
def kueue_inactive(snapshot: Snapshot) -> Match | None:
    """The Kueue queue of the run does not exist, or is stopped."""
    queue = _queue(snapshot)
    if not queue or not snapshot.spec.get("suspend"):
        return None
    for name, found in _queue_conditions(snapshot):
        is_inactive = found["type"] == "Active" and found["status"] == "False"
        is_inadmissible = found.get("reason") == "Inadmissible"
        if is_inactive or is_inadmissible:
            return Match(
                cause=f"Kueue queue {queue} admits nothing: {found.get('message', '')}",
                evidence=(
                    evidence(name, f"{found['type']} {found['status']}: {found.get('reason')}"),
                ),
            )
    is_asked = QUEUE_KIND not in snapshot.missing_kinds and not any(
        line.startswith(QUEUE_KIND) for line in snapshot.unread
    )
    if snapshot.local_queue is None and snapshot.workload is None:
        if not is_asked:
            what = "Kueue is not installed" if QUEUE_KIND in snapshot.missing_kinds else ""
        else:
            what = f"namespace {snapshot.namespace} has no LocalQueue {queue}"
        if what:
            return Match(
                cause=f"the run waits in Kueue queue {queue}, and {what}",
                evidence=(
                    evidence(f"RayJob {snapshot.submission}", f"label {QUEUE_LABEL}: {queue}"),
                ),
            )
    return None


def _waiting(snapshot: Snapshot) -> Object | None:
    """Return the Workload of a run that waits for quota, else None."""
    workload = snapshot.workload
    if not _queue(snapshot) or not snapshot.spec.get("suspend") or workload is None:
        return None
    is_reserved = condition(workload, "QuotaReserved").get("status") == "True"
    is_evicted = condition(workload, "Evicted").get("status") == "True"
    is_over = is_finished(workload) or is_deactivated(workload) or (is_reserved and not is_evicted)
    return None if is_over else workload


@failure(
    "kueue-failed-to-start",
    seen="a suspended RayJob whose Workload is `Finished FailedToStart`",
    remedy="Kueue does not try again. `trainyard stop {run} -n {namespace}` and submit the run again: it "
    "starts from its last checkpoint. Kueue 0.17 does this to an elastic run that has grown and was then "
    "suspended or preempted (kueue#12994): upgrade it.",
)
def kueue_failed_to_start(snapshot: Snapshot) -> Match | None:
    """Kueue has admitted the run and could not start it."""
    workload = snapshot.workload
    if not _queue(snapshot) or workload is None:
        return None
    finished = condition(workload, "Finished")
    if finished.get("reason") != FAILED_TO_START:
        return None
    return Match(
        cause=f"Kueue has admitted the run and could not start it: {finished.get('message', '')}",
        evidence=(evidence(f"Workload {name_of(workload)}", f"Finished: {FAILED_TO_START}"),),
    )


@failure(
    "kueue-too-large",
    seen="a Workload without quota, whose message names a `maximum capacity` that it exceeds",
    remedy="Ask for less (--gpus, --workers), name a pool or queue with more quota, or raise the "
    "ClusterQueue's quota: waiting does not help.",
)
def kueue_too_large(snapshot: Snapshot) -> Match | None:
    """The run is larger than all of the quota that its Kueue queue can ever have."""
    workload = _waiting(snapshot)
    if workload is None:
        return None
    reserved = condition(workload, "QuotaReserved")
    message = str(reserved.get("message") or "")
    if not exceeds_all_quota(message):
        return None
    return Match(
        cause=f"the run is larger than all quota of Kueue queue {_queue(snapshot)}: {shortened(message)}",
        evidence=(
            evidence(
                f"Workload {name_of(workload)}",
                f"QuotaReserved {reserved.get('status', 'unset')}: {reserved.get('reason', '')}",
            ),
        ),
    )


@failure(
    "kueue-domain-too-small",
    seen="a Workload without quota that requires one topology domain, such as a rack; the nodes",
    remedy="Set resources.topology_mode: preferred in the run file, or topologyMode of the pool, to let the "
    "workers use several domains; or ask for less (--gpus, --workers). Waiting does not help.",
)
def kueue_domain_too_small(snapshot: Snapshot) -> Match | None:
    """The workers must share one topology domain, such as a rack, and none is large enough."""
    workload = _waiting(snapshot)
    if workload is None or snapshot.nodes is None:
        return None
    for pod_set, label in required_topologies(workload):
        fitting = _pods_that_fit(snapshot.nodes, pod_set["template"]["spec"], label)
        largest = max(fitting.values(), default=0)
        if largest < pod_set["count"]:
            sizes = (
                ", ".join(f"{domain}: {fitting[domain]}" for domain in sorted(fitting)) or "none"
            )
            return Match(
                cause=f"{pod_set['count']} pods must share one {label}, and no {label} has room for more "
                f"than {largest} of them, even without other runs",
                evidence=(
                    evidence(f"Workload {name_of(workload)}", f"topologyRequest required: {label}"),
                    evidence(
                        f"{len(snapshot.nodes)} nodes", f"room for pods in each {label}: {sizes}"
                    ),
                ),
            )
    return None


def _pods_that_fit(nodes: tuple[Object, ...], pod_spec: Object, label: str) -> Counter[str]:
    """Return how many pods fit in each topology domain if no other pods are there, by the domain's name.

    It is an upper bound: labels of the ResourceFlavor, taints and pods of DaemonSets are not counted, and
    domains of one name below several others, such as `rack-1` in two zones, are taken as one.
    """
    request = requests_of(pod_spec)
    fitting: Counter[str] = Counter()
    for node in nodes:
        labels = node["metadata"]["labels"]
        if label in labels and selects(pod_spec, name_of(node), labels):
            free = amounts_of(node["status"]["allocatable"])
            fitting[labels[label]] += count_fitting_pods(free, request)
    return fitting


@failure(
    "kueue-waiting",
    seen="a suspended RayJob whose Workload has no quota reserved",
    remedy="Wait, ask for less (--gpus), give the run a higher queue.priority, or raise the "
    "ClusterQueue's quota. `kubectl get workloads -n {namespace}` shows which workloads are "
    "before it.",
)
def kueue_waiting(snapshot: Snapshot) -> Match | None:
    """The run waits in its Kueue queue for quota."""
    workload = _waiting(snapshot)
    if workload is None:
        return None
    name = f"Workload {name_of(workload)}"
    reserved, evicted = condition(workload, "QuotaReserved"), condition(workload, "Evicted")
    place = (
        "" if snapshot.queue_position is None else f", at position {snapshot.queue_position + 1}"
    )
    spent = duration(snapshot.seconds_since(workload["metadata"].get("creationTimestamp")))
    why = shortened(reserved.get("message") or "no quota reserved yet")
    state = f"QuotaReserved {reserved.get('status', 'unset')}: {reserved.get('reason', '')}"
    seen = [evidence(name, state)]
    what = "waits"
    if evicted.get("status") == "True" and evicted.get("reason") != "Deactivated":
        whom = f" for run {snapshot.preemptor}" if snapshot.preemptor else ""
        what = f"was put back ({evicted.get('reason', '')}{whom}) and waits"
        seen.append(evidence(name, f"Evicted: {shortened(evicted.get('message') or '')}"))
    return Match(
        cause=f"the run {what} in Kueue queue {_queue(snapshot)} for {spent}{place}: {why}",
        evidence=tuple(seen),
    )


@failure(
    "suspended",
    seen="RayJob spec.suspend: true without a Kueue queue, or a Workload with spec.active: false",
    remedy="Resume it with `trainyard resume {run} -n {namespace}`; it starts from its last "
    "checkpoint.",
)
def suspended(snapshot: Snapshot) -> Match | None:
    """The RayJob of the run is suspended."""
    is_suspended = snapshot.spec.get("suspend") or snapshot.phase == "suspended"
    if not is_suspended or snapshot.is_over:
        return None
    if _queue(snapshot):
        workload = snapshot.workload
        if workload is None or not is_deactivated(workload):
            return None
        return Match(
            cause=f"the run is suspended: Kueue queue {_queue(snapshot)} passes it over until it is resumed",
            evidence=(evidence(f"Workload {name_of(workload)}", "spec.active: false"),),
        )
    return Match(
        cause="the run is suspended: it has no pods and waits to be resumed",
        evidence=(evidence(f"RayJob {snapshot.submission}", "spec.suspend: true"),),
    )
