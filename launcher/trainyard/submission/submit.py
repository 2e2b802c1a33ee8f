"""Create the RayJob of a run; a run has at most one active submission, and submitting is idempotent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard.planning.comparison.run_diff import require_same_identity
from trainyard.submission.polling import comes_true
from trainyard.submission.status import ENDED, phase_of

Object = dict[str, Any]
Submitted = Literal["created", "live", "resubmitted"]

GONE_LIMIT_S = 180.0
"""For how many seconds a RayJob may take to be deleted; without the KubeRay operator it never is."""
POLL_S = 0.5


def submit_rayjob(
    rayjobs: RayjobApi,
    job: Object,
    set_aside: Callable[[], None] | None = None,
    upload: Callable[[], None] | None = None,
    forget_failure: Callable[[], None] | None = None,
) -> Submitted:
    """Create a RayJob, or find that it is active already.

    A RayJob of the same name that has ended is deleted first, and the run resumes. `set_aside` renames the
    run's folder, so that the run starts from the beginning. `upload` writes the code to the folder.
    `forget_failure` withdraws the records that are meant for the retries of the ended RayJob: by one a retry
    repeats an error instead of trying again, by the other it knows how much time is left. It is called if
    retries were left, because then the records may still be there. Raises
    ClusterError if another submission of the run is active, or if the name belongs to another object, and
    ConfigError if the run trains another model.
    """
    name, run = job["metadata"]["name"], job["metadata"]["labels"][RUN_LABEL]
    existing = find_same_submission(rayjobs, job, is_fresh=set_aside is not None)
    if existing is not None and is_live(existing):
        return "live"
    if existing is not None:
        delete_and_wait(rayjobs, name)
    if set_aside is not None:
        set_aside()  # with the record of the failure
    elif forget_failure is not None and existing is not None and _leaves_records(existing, job):
        forget_failure()
    if upload is not None:
        upload()
    try:
        created = rayjobs.submit_job(job)
    except ClusterError as error:
        winner = rayjobs.get_job(name) if error.reason == "AlreadyExists" else None
        if winner is None or not _is_ours(winner, run):
            raise
        return "live"  # the same run file was submitted twice at once
    _withdraw_the_later(rayjobs, created, run)
    return "created" if existing is None else "resubmitted"


def find_same_submission(rayjobs: RayjobApi, job: Object, *, is_fresh: bool) -> Object | None:
    """Return the RayJob of the same name that exists on the cluster, active or ended; or None.

    Raises as `submit_rayjob` does if this RayJob cannot be created now.
    """
    name, run = job["metadata"]["name"], job["metadata"]["labels"][RUN_LABEL]
    existing = rayjobs.get_job(name)
    if existing is not None and not _is_ours(existing, run):
        raise ClusterError(
            f"RayJob {name} exists and is not ours: it lacks the labels of run {run}",
            "Delete or rename that object, or give the run another name with --name.",
            reason="AlreadyExists",
        )
    others = rayjobs.list_jobs(run)
    if not is_fresh:
        require_same_identity(others, job)
    for other in others:
        its = other["metadata"]["name"]
        if is_live(other) and (its != name or is_fresh):
            what = f"this run file makes {name}" if its != name else "would lose its folder"
            raise ClusterError(
                f"run {run} is live as {its}, and {what}",
                f"Stop it first (`trainyard stop {run} {rayjobs.options}`), or give this run another name "
                "with --name.",
                reason="Conflict",
            )
    return existing


def _withdraw_the_later(rayjobs: RayjobApi, created: Object, run: str) -> None:
    """Of two run files that were submitted at once under one name, the later one gives way."""
    mine = created["metadata"]["name"]
    for other in rayjobs.list_jobs(run):
        name = other["metadata"]["name"]
        if name != mine and is_live(other) and _age(other) < _age(created):
            rayjobs.delete_job(mine)
            raise ClusterError(
                f"run {run} was submitted as {name} at the same moment: {mine} was taken back",
                f"Stop that one (`trainyard stop {run} {rayjobs.options}`), or give this run another name "
                "with --name.",
                reason="Conflict",
            )


def _leaves_records(ended: Object, job: Object) -> bool:
    """Whether the folder may have records for the retries of an ended RayJob.

    That is so if they were cancelled, or if its time is limited and its last attempt has failed.
    """
    has_limit = "activeDeadlineSeconds" in ended["spec"]
    failed = phase_of(ended.get("status", {})) == "failed"
    return _retries(ended) < _retries(job) or (has_limit and failed)


def _retries(job: Object) -> int:
    return int(job["spec"].get("backoffLimit", 0))


def _age(job: Object) -> tuple[str, str]:
    """Return the key that orders RayJobs by age; within one second their names decide."""
    return str(job["metadata"].get("creationTimestamp", "")), str(job["metadata"]["name"])


def delete_and_wait(
    rayjobs: RayjobApi,
    name: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Delete a RayJob and wait until it does not exist any more."""
    rayjobs.delete_job(name)
    if not comes_true(
        lambda: rayjobs.get_job(name) is None,
        limit_s=GONE_LIMIT_S,
        poll_s=POLL_S,
        clock=clock,
        sleep=sleep,
    ):
        raise ClusterError(
            f"RayJob {name} is still being deleted after {GONE_LIMIT_S:g} s",
            "Its finalizer is removed by the KubeRay operator: check that the operator runs.",
            reason="Timeout",
        )


def _is_ours(job: Object, run: str) -> bool:
    labels = job["metadata"].get("labels", {})
    return bool((OWNER_LABELS | {RUN_LABEL: run}).items() <= labels.items())


def is_live(job: Object) -> bool:
    """Return whether a submission has not ended."""
    return phase_of(job.get("status", {})) not in ENDED
