"""A RayJob's status is one phase, and a watch ends when the submission does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cluster import FakeCluster

from trainyard.cluster.follow import SILENT_LIMIT_S
from trainyard.errors import ClusterError, ClusterUnreachable, RunFailed, TimedOut
from trainyard.submission.current_status import current_status
from trainyard.submission.status import RunStatus, attempts_of, message_of, pending_reason, phase_of
from trainyard.submission.watch import StatusTracker, cancelling_retries, watch_submission
from trainyard_trainer.run_files.driver_output import last_record

Object = dict[str, Any]


@pytest.mark.parametrize(
    ("deployment", "job", "failed", "phase"),
    [
        ("", "", 0, "accepted"),
        ("", "", 1, "retrying"),
        ("Initializing", "", 0, "starting"),
        ("Waiting", "", 0, "starting"),
        ("Running", "", 0, "submitting"),
        ("Running", "RUNNING", 0, "running"),
        ("Running", "FAILED", 0, "running"),
        ("Retrying", "FAILED", 1, "retrying"),
        ("Suspended", "", 0, "suspended"),
        ("Complete", "SUCCEEDED", 0, "succeeded"),
        ("Complete", "STOPPED", 0, "stopped"),
        ("Failed", "FAILED", 3, "failed"),
        ("Failed", "RUNNING", 1, "failed"),
        ("ValidationFailed", "", 0, "failed"),
    ],
)
def test_a_status_is_one_phase(deployment: str, job: str, failed: int, phase: str) -> None:
    status = {"jobDeploymentStatus": deployment, "jobStatus": job, "failed": failed}
    assert phase_of(status) == phase


@pytest.mark.parametrize(
    ("status", "attempts"),
    [
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, 1),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "failed": 2}, 3),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED", "failed": 1}, 2),
        ({"jobDeploymentStatus": "Failed", "failed": 3}, 3),
    ],
)
def test_attempts_count_the_one_under_way(status: Object, attempts: int) -> None:
    assert attempts_of(status) == attempts


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"message": "Job is currently running."}, ""),
        ({"reason": "DeadlineExceeded", "message": "too late"}, "DeadlineExceeded: too late"),
        (
            {"reason": "AppFailed", "message": "log:\nTraceback\nerror: no CUDA\n    Use CPUs.\n"},
            "AppFailed: error: no CUDA Use CPUs.",
        ),
        (
            {"reason": "AppFailed", "message": "log:\nTraceback\nKeyError: 1\n"},
            "AppFailed: KeyError: 1",
        ),
    ],
)
def test_a_message_tells_the_reason_without_the_log(status: Object, message: str) -> None:
    assert message_of(status) == message


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ('x\nprogress {"percent": 1}\nprogress {"percent": 2}\ny', {"percent": 2}),
        ('progress {"percent": 1}\nprogress {"perc', {"percent": 1}),
        ("nothing of that kind", None),
    ],
)
def test_the_last_whole_record_of_a_log_counts(log: str, found: Object | None) -> None:
    assert last_record(log, "progress ") == found


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]},
            "head is not scheduled: no GPU",
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ErrImagePull", "message": "404"}}}
                ]
            },
            "head waits: ErrImagePull: 404",
        ),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}]}, ""),
        ({"containerStatuses": [{"state": {"running": {}}}]}, ""),
    ],
)
def test_a_pod_that_does_not_start_says_why(status: Object, reason: str) -> None:
    assert pending_reason([{"metadata": {"name": "head"}, "status": status}]) == reason


def test_a_running_head_tells_the_progress() -> None:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="RUNNING")
    cluster.add_head("digits-1-abc", 'progress {"percent": 40}\n')
    assert current_status(cluster, job).progress == {"percent": 40}


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def watch(cluster: FakeCluster) -> list[str]:
    clock = Clock()
    statuses = watch_submission(cluster, "digits-1", "digits", clock=clock, sleep=clock.sleep)
    return [phase for phase, _ in itertools.groupby(run_status.phase for run_status in statuses)]


def test_a_watch_goes_on_through_a_retry_to_the_end() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = [
        ("Initializing", ""), ("Running", "RUNNING"), ("Retrying", "FAILED"),
        ("Running", "RUNNING"), ("Complete", "SUCCEEDED"),
    ]  # fmt: skip
    assert watch(cluster) == [
        "accepted", "starting", "running", "retrying", "running", "succeeded"
    ]  # fmt: skip


class StillCluster(FakeCluster):
    """A cluster on which nothing happens while it is watched."""

    def watch(self, *arguments: Any, **options: Any) -> Iterator[Object]:
        threading.Event().wait()
        yield {}


def test_a_watch_ends_after_its_time_and_leaves_the_run_alone() -> None:
    cluster = StillCluster()
    cluster.add_job("digits-1", status="RUNNING")
    with pytest.raises(TimedOut, match=r"run digits has not ended within 0\.1 s") as raised:
        list(watch_submission(cluster, "digits-1", "digits", timeout_s=0.1))
    assert raised.value.exit_code == 124
    assert cluster.calls == []


def test_a_run_that_its_driver_has_stopped_says_why() -> None:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="STOPPED")
    cluster.add_head("digits-1-abc", "stopped: all is saved\nerror: the run stopped at its limit\n")
    found = current_status(cluster, job)
    assert (found.phase, found.message) == ("stopped", "the run stopped at its limit")


def test_a_deleted_rayjob_ends_the_watch_with_the_remedy() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = [None]
    with pytest.raises(RunFailed, match="deleted while it was watched"):
        watch(cluster)


@pytest.mark.parametrize("trouble", [["silent", "silent"], ["expired"], ["ended"], ["ended"] * 3])
def test_a_watch_outlives_its_connection(trouble: list[str]) -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = [*trouble, ("Initializing", ""), ("Complete", "SUCCEEDED")]
    assert watch(cluster)[0] == "accepted"


def test_what_happened_while_the_cluster_was_away_is_told_afterwards() -> None:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="RUNNING")
    cluster.script = ["silent", ("Complete", "SUCCEEDED")]
    assert watch(cluster) == ["running", "succeeded"]
    assert job["status"]["jobStatus"] == "SUCCEEDED"


def test_a_cluster_that_stays_silent_is_reported() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = ["silent"] * int(SILENT_LIMIT_S * 2)
    with pytest.raises(ClusterUnreachable):
        watch(cluster)


def test_a_watch_ends_with_the_driver_s_last_words() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="RUNNING")
    cluster.add_head("digits-1-abc", 'progress {"percent": 100}\nsummary {"outcome": "succeeded"}')
    cluster.script = [("Complete", "SUCCEEDED")]
    clock = Clock()
    *_, last = watch_submission(cluster, "digits-1", "digits", clock=clock, sleep=clock.sleep)
    assert (last.phase, last.summary) == ("succeeded", {"outcome": "succeeded"})
    assert last.progress == {"percent": 100}


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_retries_are_cancelled_after_an_error_that_a_retry_cannot_cure(
    is_allowed: bool,
) -> None:
    cluster = FakeCluster() if is_allowed else ClusterForReaders()
    cluster.add_job("digits-1", status="RUNNING")["spec"] = {"backoffLimit": 2}
    statuses = [RunStatus(submission="digits-1", phase="running", is_final_failure=each)
                for each in (False, True, True)]  # fmt: skip
    assert list(cancelling_retries(cluster, "digits-1", statuses)) == statuses
    retries = cluster.objects["RayJob", "digits-1"]["spec"]["backoffLimit"]
    assert (retries, len(cluster.calls)) == ((0, 1) if is_allowed else (2, 0))


class ClusterForReaders(FakeCluster):
    """A cluster whose user may not change RayJobs."""

    def patch(self, kind: str, name: str, body: Object) -> Object:
        raise ClusterError("no right to patch", reason="Forbidden")


# What was heard -> a run_status.


def job_at(deployment: str, job: str, **status: Any) -> dict[str, Object]:
    whole = {"jobDeploymentStatus": deployment, "jobStatus": job, "rayClusterName": "c-1", **status}
    return {"d": {"metadata": {"name": "d"}, "status": whole}}


def pod_of(ray_cluster: str, message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    labels = {"ray.io/cluster": ray_cluster}
    return {"metadata": {"name": "p", "labels": labels}, "status": {"conditions": [condition]}}


def test_a_start_is_shown_with_what_its_own_pods_wait_for() -> None:
    heard = StatusTracker("d")
    assert heard.update_pods({}) is None
    assert heard.update_job(job_at("Initializing", "")).message == ""
    run_status = heard.update_pods({"p": pod_of("c-0", "of the last attempt")})
    assert run_status is not None
    assert run_status.message == ""
    run_status = heard.update_pods({"p": pod_of("c-1", "no GPU")})
    assert run_status is not None
    assert run_status.message == "p is not scheduled: no GPU"
    assert heard.update_job(job_at("Running", "RUNNING")).message == ""


def test_progress_stays_until_the_next_attempt() -> None:
    heard = StatusTracker("d")
    heard.update_job(job_at("Running", "RUNNING"))
    assert heard.read_log_line("a line like others") is None
    run_status = heard.read_log_line('progress {"percent": 5}')
    assert run_status is not None
    assert run_status.progress == {"percent": 5}
    assert heard.update_job(job_at("Running", "RUNNING", message="x")).progress == {"percent": 5}
    retrying = heard.update_job(job_at("Retrying", "FAILED", failed=1))
    assert (retrying.progress, retrying.attempts) == (None, 2)


def test_a_driver_tells_that_a_retry_is_of_no_use() -> None:
    heard = StatusTracker("d")
    heard.update_job(job_at("Running", "RUNNING"))
    run_status = heard.read_log_line('final failure {"exit_code": 2}')
    assert run_status is not None
    assert run_status.is_final_failure


def test_a_driver_is_heard_only_while_it_runs() -> None:
    heard = StatusTracker("d")
    assert heard.ray_cluster == ""
    heard.update_job(job_at("Initializing", ""))
    assert heard.ray_cluster == ""
    heard.update_job(job_at("Running", "RUNNING"))
    assert heard.ray_cluster == "c-1"
