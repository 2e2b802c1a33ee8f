"""Stop, suspend and resume submissions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError
from trainyard.labels import RUN_LABEL
from trainyard.submission.current_status import (
    HEAD_CONTAINER,
    StatusAccess,
    end_of_log,
    head_pod,
)
from trainyard.submission.polling import comes_true
from trainyard.submission.queue_wait import (
    failed_to_start,
    is_deactivated,
    queue_of,
    shortened,
    unfinished,
)
from trainyard.submission.status import ENDED, condition, phase_of
from trainyard.submission.submit import delete_and_wait, is_live
from trainyard_trainer.run_files.driver_output import STOPPED_STEP
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

Object = dict[str, Any]
Ended = Literal["in good order", "killed", "not running"]
"""How the driver of a stopped submission ended: by itself, killed, or there was no driver."""

STOP_LIMIT_S = 90.0
"""For how many seconds a driver may take to stop: its workers have 40 s to save a checkpoint."""
WORKLOAD_LIMIT_S = 15.0
"""For how many seconds Kueue may take to create the Workload of a new RayJob; normally it takes one."""
POLL_S = 1.0
DASHBOARD = "http://127.0.0.1:8265"


@dataclass(frozen=True, kw_only=True, slots=True)
class StopResult:
    """The result of stopping a submission."""

    ended: Ended
    step: int | None = None
    """The step of the checkpoint that the workers have saved last; None if they reported none."""


class ControlAccess(StatusAccess, Protocol):
    """The methods of `Cluster` with which a submission is stopped, suspended and resumed."""

    def patch(self, kind: str, name: str, body: Object) -> Object: ...
    def execute(self, pod: str, container: str, command: Sequence[str]) -> Any: ...


def live_jobs(rayjobs: RayjobApi, run: str) -> list[Object]:
    """Return the submissions of a run that have not ended; normally there is at most one."""
    return [job for job in rayjobs.list_jobs(run) if is_live(job)]


def stop_job(
    cluster: ControlAccess,
    rayjobs: RayjobApi,
    job: Object,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> StopResult:
    """Stop the driver, which saves a checkpoint first, and then delete its RayJob.

    Deleting the RayJob at once would delete the pods while the workers still save.
    """
    name = job["metadata"]["name"]
    stopped = StopResult(ended="not running")
    if phase_of(job.get("status", {})) == "running":
        _ask_to_stop(cluster, job)
        ended: Ended = "in good order" if _has_ended(rayjobs, name, clock, sleep) else "killed"
        stopped = StopResult(ended=ended, step=_saved_step(cluster, job))
    delete_and_wait(rayjobs, name, clock=clock, sleep=sleep)
    return stopped


def _saved_step(cluster: ControlAccess, job: Object) -> int | None:
    pod = head_pod(cluster, job["status"]["rayClusterName"])
    log = "" if pod is None else end_of_log(cluster, job, pod)
    said = STOPPED_STEP.findall(log)
    return int(said[-1]) if said else None


def _ask_to_stop(cluster: ControlAccess, job: Object) -> None:
    """Run `ray job stop` in the head pod: it sends SIGTERM to the driver, which has time to save.

    In the pod the command has the cluster's token, so it needs only the right to execute commands there.
    """
    status, run = job["status"], job["metadata"]["labels"][RUN_LABEL]
    pod = head_pod(cluster, status["rayClusterName"])
    if pod is None:
        return  # the head is being replaced: there is no driver, and nothing to save
    stop = ["ray", "job", "stop", "--no-wait", "--address", DASHBOARD, status["jobId"]]
    with cluster.execute(pod, HEAD_CONTAINER, stop) as process:
        said = b"".join(data for _, data in process.output()).decode(errors="replace")
        if process.exit_code != 0:
            raise ClusterError(
                f"the driver of {job['metadata']['name']} could not be asked to stop",
                *said.strip().splitlines()[-2:],
                f"`trainyard stop --now {run} {cluster.options}` deletes the run without a checkpoint of "
                "this moment.",
            )


def _has_ended(
    rayjobs: RayjobApi, name: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    def has_ended() -> bool:
        job = rayjobs.get_job(name)
        return job is None or phase_of(job.get("status", {})) in ENDED

    return comes_true(has_ended, limit_s=STOP_LIMIT_S, poll_s=POLL_S, clock=clock, sleep=sleep)


def suspend_job(
    cluster: ControlAccess,
    job: Object,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Delete the RayCluster of a submission until it is resumed; in a Kueue queue, Kueue does it.

    A RayJob that was created a moment ago may have no Workload yet, so this waits for one. Raises
    ClusterError for a run on a standing RayCluster, and for one that Kueue could not start.
    """
    if standing_cluster_of(job) is not None:
        run = job["metadata"]["labels"][RUN_LABEL]
        raise ClusterError(
            f"run {run} trains on a standing RayCluster, where KubeRay suspends no RayJob",
            f"`trainyard stop {run} {cluster.options}` saves a checkpoint and frees its places, and `submit` "
            "resumes it.",
            reason="Conflict",
        )
    if queue_of(job):
        _require_startable(cluster, job)
        _await_workload(cluster, job, clock, sleep)
        _set_active(cluster, job, False)
        return
    # KubeRay allows `suspend` only beside this way of cleaning up.
    spec = {"suspend": True, "shutdownAfterJobFinishes": True, "deletionStrategy": None}
    cluster.patch("RayJob", job["metadata"]["name"], {"spec": spec})


def resume_job(cluster: ControlAccess, job: Object) -> None:
    """Start a suspended submission again, from its last checkpoint; in a Kueue queue, when it is admitted.

    Raises ClusterError for a submission that Kueue could not start.
    """
    if queue_of(job):
        _require_startable(cluster, job)
        _set_active(cluster, job, True)
        return
    cluster.patch("RayJob", job["metadata"]["name"], {"spec": {"suspend": False}})


def is_suspended(cluster: ControlAccess, job: Object) -> bool:
    """Return whether a submission is suspended, or is being suspended, by a user.

    A RayJob in a queue of Kueue is also suspended while it waits; only its Workload tells the difference.
    """
    if queue_of(job):
        workloads = _workloads(cluster, job)
        return bool(workloads) and all(map(is_deactivated, workloads))
    return bool(job["spec"].get("suspend")) or phase_of(job.get("status", {})) == "suspended"


def _set_active(cluster: ControlAccess, job: Object, is_active: bool) -> None:
    for workload in _workloads(cluster, job):
        cluster.patch("Workload", workload["metadata"]["name"], {"spec": {"active": is_active}})


def _workloads(cluster: ControlAccess, job: Object) -> list[Object]:
    return unfinished(cluster.list("Workload"), job)


def _require_startable(cluster: ControlAccess, job: Object) -> None:
    """Raise ClusterError if Kueue could not start a RayJob: it does not try again, resumed or not."""
    workloads = cluster.list("Workload")
    if unfinished(workloads, job) or not (failed := failed_to_start(workloads, job)):
        return
    run = job["metadata"]["labels"][RUN_LABEL]
    message = shortened(condition(failed, "Finished").get("message") or "")
    raise ClusterError(
        f"Kueue could not start run {run}, and does not try again: {message}",
        f"`trainyard stop {run} {cluster.options}` and submit it again: it starts from its last checkpoint.",
        reason="Conflict",
    )


def _await_workload(
    cluster: ControlAccess, job: Object, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    if not comes_true(
        lambda: bool(_workloads(cluster, job)),
        limit_s=WORKLOAD_LIMIT_S,
        poll_s=POLL_S,
        clock=clock,
        sleep=sleep,
    ):
        raise ClusterError(
            f"RayJob {job['metadata']['name']} is in a Kueue queue, but Kueue has created no Workload "
            f"for it within {WORKLOAD_LIMIT_S:g} s",
            "Check that Kueue runs, and that its integration for RayJobs is enabled.",
            reason="NotFound",
        )
