"""How a submission stands, from its RayJob alone: pure functions without a cluster."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainyard_trainer.run_files.driver_output import ERROR

Object = dict[str, Any]

Phase = Literal[
    "accepted",
    "queued",
    "starting",
    "submitting",
    "running",
    "retrying",
    "suspended",
    "succeeded",
    "stopped",
    "failed",
]
"""How a submission stands, in the words that `trainyard status`, `list` and `watch` print."""

ENDED: tuple[Phase, ...] = ("succeeded", "stopped", "failed")
"""The phases in which nothing happens any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The state of a submission at one moment."""

    submission: str
    """The name of the RayJob; of a run on this machine, the run's name."""
    phase: Phase
    ran: bool = False
    """Whether a driver was started, so that the run's folder may hold more than this status."""
    attempts: int = 1
    """The number of attempts that have begun."""
    message: str = ""
    """Why the submission waits or has failed; empty where there is nothing to report."""
    progress: Object | None = None
    """The newest progress record that the driver printed, or None if it is not known."""
    summary: Object | None = None
    """The summary record of an attempt that has ended, or None."""
    is_final_failure: bool = False
    """Whether the driver has failed with an error that a retry cannot cure."""


def phase_of(status: Object) -> Phase:
    """Return the phase for the `status` of a RayJob.

    Only `jobDeploymentStatus` tells that a RayJob has ended: KubeRay sets it to `Failed` when no retry is
    left, while `jobStatus` may be FAILED between two attempts.
    """
    deployment = status.get("jobDeploymentStatus", "")
    job = status.get("jobStatus", "")
    if deployment == "Complete":
        return "succeeded" if job == "SUCCEEDED" else "stopped"
    if deployment in ("Failed", "ValidationFailed"):
        return "failed"
    if deployment == "Running":
        return "running" if job else "submitting"
    if deployment in ("Suspending", "Suspended"):
        return "suspended"
    if deployment == "Retrying" or (not deployment and status.get("failed", 0)):
        return "retrying"
    return "starting" if deployment in ("Initializing", "Waiting") else "accepted"


def error_lines(log: str) -> list[str]:
    """Return the lines of the last `error: ...` in a driver's log, stripped; else the log's last line.

    The details of an error are indented: lines that Ray prints after them are left out.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    if not starts:
        return [line.strip() for line in lines[-1:]]
    first, *rest = lines[starts[-1] :]
    details = itertools.takewhile(lambda line: line.startswith(" "), rest)
    return [first.strip(), *(line.strip() for line in details)]


def with_cause_of_stop(run_status: RunStatus, error: str | None) -> RunStatus:
    """Add to the status of a stopped submission the error with which its driver ended, if that is known."""
    if run_status.phase != "stopped" or not error or run_status.message:
        return run_status
    return replace(run_status, message=error.removeprefix(ERROR))


def has_error(log: str) -> bool:
    """Whether a line of a driver's log is `error: ...`."""
    return any(line.startswith(ERROR) for line in log.splitlines())


def message_of(status: Object) -> str:
    """Return why a submission failed: KubeRay's reason, and the error from the log that KubeRay quotes.

    A message without a reason only repeats the phase, and is left out.
    """
    if not status.get("reason"):
        return ""
    return f"{status['reason']}: {' '.join(error_lines(status.get('message', '')))}"


def attempts_of(status: Object) -> int:
    """Return how many attempts have begun: those that failed, and the current or successful one."""
    failed = int(status.get("failed", 0))
    return failed + (0 if phase_of(status) in ("failed", "accepted") and failed else 1)


def condition(thing: Object, kind: str) -> Object:
    """Return the condition of a kind in the status of an object; empty if it has none."""
    conditions = thing.get("status", {}).get("conditions") or []
    return next((dict(found) for found in conditions if found["type"] == kind), {})


def pending_reason(pods: list[Object]) -> str:
    """Return why the first pod that waits does not start, as the scheduler or the kubelet reports it."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        scheduled = condition(pod, "PodScheduled")
        if scheduled.get("status") == "False":
            return f"{name} is not scheduled: {scheduled.get('message', '')}"
        for container in [
            *status.get("initContainerStatuses", []),
            *status.get("containerStatuses", []),
        ]:
            waiting = container["state"].get("waiting", {})
            if waiting.get("message"):
                return f"{name} waits: {waiting['reason']}: {waiting['message']}"
    return ""


def run_status_of(job: Object) -> RunStatus:
    """Return the status of a submission as far as its RayJob tells it."""
    status = job.get("status", {})
    return RunStatus(
        submission=job["metadata"]["name"],
        phase=phase_of(status),
        ran=bool(status.get("jobStatus")),
        attempts=attempts_of(status),
        message=message_of(status),
    )


def with_pending_reason(run_status: RunStatus, job: Object, pending: list[Object]) -> RunStatus:
    """Add to the status of a starting submission why the first of its pending pods does not start."""
    if run_status.phase != "starting" or run_status.message:
        return run_status
    ray_cluster = job.get("status", {}).get("rayClusterName")
    pods = [
        pod for pod in pending if pod["metadata"]["labels"].get("ray.io/cluster") == ray_cluster
    ]
    return replace(run_status, message=pending_reason(pods))
