"""What a run is doing, and for how long."""

from __future__ import annotations

from trainyard.diagnosis.snapshot import Object, Snapshot, containers, is_ready, name_of
from trainyard.submission.place_wait import place_text
from trainyard.submission.queue_wait import is_deactivated
from trainyard.submission.status import attempts_of, condition
from trainyard_trainer.run_files.driver_output import (
    PROGRESS,
    WAITING,
    WORKER_FAILED,
    last_record,
    record_of,
)

PODS_NAMED = 3
"""What the driver says when Ray Train has seen it; the next progress comes from the group after it."""


def duration(seconds: float) -> str:
    """`45 s`, `4 min`, `3 h 12 min`, `2 d 5 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def current_activity(snapshot: Snapshot) -> str:
    """One sentence: what it waits for or does, and since when."""
    phase = snapshot.phase
    if snapshot.job is None or phase is None:
        return _without_job(snapshot)
    status, metadata = snapshot.status, snapshot.job["metadata"]
    if "deletionTimestamp" in metadata:
        return (
            f"being deleted for {duration(snapshot.seconds_since(metadata['deletionTimestamp']))}"
        )
    since = status.get("startTime") or metadata.get("creationTimestamp")
    spent = duration(snapshot.seconds_since(since))
    ended = ""
    if status.get("endTime"):
        ended = f" {duration(snapshot.seconds_since(status['endTime']))} ago"
    attempts = attempts_of(status)
    number = f"attempt {attempts}"
    match phase:
        case "accepted":
            return f"waiting {spent} for the KubeRay operator to take it up"
        case "starting":
            return f"{number}: {_waiting_for_pods(snapshot, spent)}"
        case "submitting":
            return f"{number}: pods are there, waiting for the driver to start, {spent} after the start"
        case "running":
            if place := place_text(last_record(snapshot.log, WAITING), snapshot.job or {}):
                return f"{number}: {place}, {spent} after the start"
            return f"{number}: running for {spent}{_progress(snapshot)}{_failed_since(snapshot)}"
        case "retrying":
            return f"attempt {attempts - 1} has failed, the next one is coming"
        case "suspended" | "queued":
            created = snapshot.seconds_since(metadata.get("creationTimestamp"))
            is_waiting = snapshot.workload is not None and not is_deactivated(snapshot.workload)
            what = "waiting in its queue" if is_waiting else "suspended"
            return f"{what}; submitted {duration(created)} ago"
        case "succeeded":
            return f"succeeded{ended}"
        case "stopped":
            return f"stopped{ended}"
        case "failed":
            return f"failed{ended}, after {attempts} attempt{'' if attempts == 1 else 's'}"


def _without_job(snapshot: Snapshot) -> str:
    if any(line.startswith("RayJob:") for line in snapshot.unread):
        return "what it does is not known: RayJobs may not be read here"
    if snapshot.missing_kinds:
        return "nothing: RayJobs are not known here"
    outcome = (snapshot.summary or {}).get("outcome")
    if outcome:
        return f"no RayJob is there any more; its folder says: {outcome}"
    return "no RayJob is there any more, and its folder tells no outcome"


def _waiting_for_pods(snapshot: Snapshot, spent: str) -> str:
    wanted = max(snapshot.pods_wanted, len(snapshot.pods))
    unready = [pod for pod in snapshot.pods if not is_ready(pod)]
    missing = wanted - len(snapshot.pods) + len(unready)
    if not missing:
        return f"all {wanted} pods are ready; waiting {spent} for the operator to see it"
    named = [f"{name_of(pod)} {_state(pod)}" for pod in unready[:PODS_NAMED]]
    if len(unready) > PODS_NAMED:
        named.append(f"{len(unready) - PODS_NAMED} more")
    if not_there := wanted - len(snapshot.pods):
        named.append(f"{not_there} not created yet")
    return f"waiting {spent} for {missing} of {wanted} pods: {', '.join(named)}"


def _state(pod: Object) -> str:
    """What a pod that is not ready is at."""
    if condition(pod, "PodScheduled").get("status") != "True":
        return "is not placed on a node yet"
    for container in containers(pod):
        state = container.get("state", {})
        if "waiting" in state:
            reason = state["waiting"].get("reason", "")
            starting = {
                "PodInitializing": "waits for its init container",
                "ContainerCreating": "mounts volumes and pulls its image",
            }
            return starting.get(reason, f"waits: {reason}")
        if "running" in state and not container.get("ready"):
            return f"runs {container['name']}, which is not ready yet"
    return "starts"


def _progress(snapshot: Snapshot) -> str:
    progress = last_record(snapshot.log, PROGRESS)
    if progress is None:
        said = [line.strip() for line in snapshot.log.splitlines() if line.strip()]
        return "; no step reported yet" + (f"; its log ends: {said[-1]}" if said else "")
    if "reports" in progress:  # of own code
        return f"; report {progress['reports']}"
    # A driver that has only just begun says no times.
    return (
        f"; epoch {progress.get('epoch')}/{progress.get('epochs')}, "
        f"step {progress.get('step')}/{progress.get('steps')}"
    )


def _failed_since(snapshot: Snapshot) -> str:
    """Of a run whose workers have failed, and have not trained again."""
    for line in reversed(snapshot.log.splitlines()):
        if record_of(line, PROGRESS) is not None:
            break
        if failed := WORKER_FAILED.search(line):
            return f"; its workers start anew: {failed[0].rstrip()}"
    return ""
