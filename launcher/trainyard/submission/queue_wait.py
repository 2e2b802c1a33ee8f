"""How a submission waits in a queue of Kueue: by its Workload, its position and Kueue's reason, shortened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainyard.errors import ClusterError
from trainyard.labels import QUEUE_LABELS
from trainyard.submission.status import ENDED, RunStatus, condition, phase_of

Object = dict[str, Any]

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""The label of a Workload with the UID of its RayJob."""

NOT_NOW = re.compile(r"insufficient unused quota for (\S+) in flavor (\S+), (\S+) more needed")
NEVER = re.compile(
    r"insufficient quota for (\S+) in flavor (\S+), previously considered podsets requests \((\S+)\) "
    r"\+ current podset request \((\S+)\) > maximum capacity \((\S+)\)"
)
"""The two reasons that Kueue gives for a resource of a flavor: not now, and not with all of the quota."""
POD_SET = "couldn't assign flavors to pod set "
PREEMPTOR = re.compile(r"JobUID: ([^)\s]+)\)")
"""The UID of the job for which Kueue has evicted a Workload, in the message of the condition."""

FAILED_TO_START = "FailedToStart"
"""Why a Workload is finished if Kueue could not start its RayJob."""

REASONS_SHOWN = 2
LENGTH_SHOWN = 200
"""What is shown of a message of Kueue, which names each resource of each flavor for each group of pods."""


class QueueAccess(Protocol):
    """The methods of `Cluster` with which Kueue's objects are read."""

    def get(self, kind: str, name: str) -> Object | None: ...
    def list(
        self, kind: str, labels: Mapping[str, str | None] | None = None, *, cached: bool = False
    ) -> list[Object]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueWait:
    """Where a submission stands in its queue."""

    queue: str
    is_active: bool = True
    """Whether Kueue may admit it; False after `trainyard suspend`."""
    position: int | None = None
    """How many workloads are before it in the queue; None if it is not known."""
    reason: str = ""
    """Why Kueue does not admit it, shortened."""

    def __str__(self) -> str:
        """Say where it waits and why."""
        place = "" if self.position is None else f" at position {self.position + 1}"
        why = f": {self.reason}" if self.reason else ""
        return f"waits in Kueue queue {self.queue}{place}{why}"


def queue_of(job: Object) -> str:
    """Return the Kueue queue that a RayJob names; empty if it names none."""
    return str(job["metadata"].get("labels", {}).get(QUEUE_LABELS["kueue"], ""))


def is_held(job: Object) -> bool:
    """Whether a RayJob has a Kueue queue and is suspended there: it waits, or was suspended by a user."""
    has_ended = phase_of(job.get("status", {})) in ENDED
    return bool(queue_of(job) and job.get("spec", {}).get("suspend") and not has_ended)


def unfinished(workloads: Iterable[Object], job: Object) -> list[Object]:
    """Return the Workloads of a RayJob that are not finished, oldest first.

    An elastic run has several: each change of its size makes one, and finishes the one before.
    """
    return [each for each in _owned(workloads, job) if not is_finished(each)]


def _owned(workloads: Iterable[Object], job: Object) -> list[Object]:
    """Return the Workloads of a RayJob, oldest first."""
    uid = job["metadata"].get("uid")
    return sorted(
        (
            workload
            for workload in workloads
            if any(owner["uid"] == uid for owner in workload["metadata"].get("ownerReferences", []))
        ),
        key=lambda workload: str(workload["metadata"].get("creationTimestamp", "")),
    )


def is_finished(workload: Object) -> bool:
    """Whether Kueue has finished with a Workload: its RayJob has ended, has another one, or did not start."""
    return bool(condition(workload, "Finished").get("status") == "True")


def failed_to_start(workloads: Iterable[Object], job: Object) -> Object | None:
    """Return the Workload of a RayJob that Kueue has admitted and then could not start, or None.

    It is finished, so Kueue does not try again, and the RayJob stays suspended.
    """
    own = _owned(workloads, job)
    has_failed = own and condition(own[-1], "Finished").get("reason") == FAILED_TO_START
    return own[-1] if has_failed else None


def required_topologies(workload: Object) -> Iterator[tuple[Object, str]]:
    """Yield the pod sets whose pods must share one topology domain, with the node label of its level."""
    for pod_set in workload.get("spec", {}).get("podSets") or ():
        if label := (pod_set.get("topologyRequest") or {}).get("required"):
            yield pod_set, label


def preemptor_of(workload: Object) -> str:
    """Return the UID of the job for which Kueue has evicted a Workload; empty if it was not preempted."""
    evicted = condition(workload, "Evicted")
    is_preempted = evicted.get("status") == "True" and evicted.get("reason") == "Preempted"
    found = PREEMPTOR.search(evicted.get("message") or "") if is_preempted else None
    return found[1] if found else ""


def is_deactivated(workload: Object) -> bool:
    """Whether a user has taken a Workload out of its queue, until it is resumed."""
    return workload.get("spec", {}).get("active", True) is False


def waits_of(cluster: QueueAccess, jobs: Iterable[Object]) -> dict[str, QueueWait]:
    """Return where each of these RayJobs that is held in a queue stands there, by its UID.

    It costs nothing if there is none; else one request for all Workloads and one for each queue. It is
    empty where Kueue's objects may not be read.
    """
    held = [job for job in jobs if is_held(job)]
    if not held:
        return {}
    try:
        workloads = cluster.list("Workload", cached=True)
        positions = {queue: _positions(cluster, queue) for queue in {*map(queue_of, held)}}
    except ClusterError as error:
        if error.reason in ("Forbidden", "NoSuchKind"):
            return {}
        raise
    found = {}
    for job in held:
        queue = queue_of(job)
        wait = QueueWait(queue=queue)
        if own := unfinished(workloads, job):
            wait = replace(
                wait,
                is_active=not is_deactivated(own[-1]),
                position=positions[queue].get(own[-1]["metadata"]["name"]),
                reason=reason_of(own[-1]),
            )
        elif failed := failed_to_start(workloads, job):
            message = shortened(condition(failed, "Finished").get("message") or "")
            wait = replace(wait, reason=f"Kueue could not start it: {message}")
        found[str(job["metadata"].get("uid"))] = wait
    return found


def _positions(cluster: QueueAccess, queue: str) -> dict[str, int]:
    """Return the position of each Workload that waits in a queue; empty where Kueue does not serve it."""
    try:
        pending = cluster.get("PendingWorkloads", f"{queue}/pendingworkloads") or {}
    except ClusterError as error:
        if error.reason in ("Forbidden", "NoSuchKind", "ServiceUnavailable", "503"):
            return {}
        raise
    return {
        item["metadata"]["name"]: int(item.get("positionInLocalQueue", 0))
        for item in pending.get("items") or []
    }


def with_queue_waits(
    cluster: QueueAccess, jobs: Sequence[Object], statuses: Iterable[RunStatus]
) -> list[RunStatus]:
    """Complete the statuses of submissions: where those in a queue stand there."""
    waits = waits_of(cluster, jobs)
    return [
        with_queue_wait(run_status, waits.get(str(job["metadata"].get("uid"))))
        for job, run_status in zip(jobs, statuses, strict=True)
    ]


def with_queue_wait(run_status: RunStatus, wait: QueueWait | None) -> RunStatus:
    """Complete the status of a submission that is held in a queue; nothing changes without `wait`."""
    if wait is None or run_status.phase not in ("accepted", "suspended"):
        return run_status
    if not wait.is_active:
        return replace(run_status, phase="suspended", message="suspended until it is resumed")
    return replace(run_status, phase="queued", message=str(wait))


def reason_of(workload: Object) -> str:
    """Return why Kueue does not admit a Workload, shortened; empty before Kueue has looked at it."""
    reserved = condition(workload, "QuotaReserved")
    return "" if reserved.get("status") == "True" else shortened(reserved.get("message") or "")


def shortened(message: str) -> str:
    """Return Kueue's message with its first reasons, each of them once and in few words."""
    reasons = [
        *(
            f"{_sum(assumed, asked)} {resource} asked for, flavor {flavor} has {most} at most"
            for resource, flavor, assumed, asked, most in NEVER.findall(message)
        ),
        *(
            f"{missing} more {resource} needed in flavor {flavor}"
            for resource, flavor, missing in NOT_NOW.findall(message)
        ),
    ]
    if not reasons:
        line = " ".join(message.split())
        return line if len(line) <= LENGTH_SHOWN else f"{line[: LENGTH_SHOWN - 4]} ..."
    distinct = list(dict.fromkeys(reasons))
    more = len(distinct) - REASONS_SHOWN
    return "; ".join(distinct[:REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _sum(assumed: str, asked: str) -> str:
    return asked if assumed == "0" else f"{assumed} + {asked}"


def exceeds_all_quota(message: str) -> bool:
    """Whether Kueue's message says that a group of pods fits in no flavor, even with no other run there."""
    return any(map(_never_fits, message.split(POD_SET)[1:]))


def _never_fits(message: str) -> bool:
    too_small = {flavor for _, flavor, *_ in NEVER.findall(message)}
    return bool(too_small) and {flavor for _, flavor, _ in NOT_NOW.findall(message)} <= too_small
