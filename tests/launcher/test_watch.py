"""A RayJob's status is one phase, and a watch ends when the submission does."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import FakeCluster

from launcher.errors import ClusterUnreachable, RunFailed
from launcher.kuberay import RayjobApi
from launcher.watch import (
    UNREACHABLE_LIMIT_S,
    attempts_of,
    last_record,
    look,
    message_of,
    pending_reason,
    phase_of,
    watch_run,
)

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
    assert look(cluster, job).progress == {"percent": 40}


def watch(cluster: FakeCluster, ticks: int = 100) -> list[str]:
    now = iter(range(ticks * 10_000))
    return [
        sight.phase
        for sight in watch_run(
            cluster,
            RayjobApi(cluster),
            "digits-1",
            clock=lambda: float(next(now)),
            sleep=lambda _: cluster.tick(),
        )
    ]


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


def test_a_deleted_rayjob_ends_the_watch_with_the_remedy() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = [None]
    with pytest.raises(RunFailed, match="deleted while it was watched"):
        watch(cluster)


def test_a_watch_outlives_a_silent_cluster() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = ["silent", "silent", ("Complete", "SUCCEEDED")]
    assert watch(cluster) == ["accepted", "succeeded"]


def test_a_cluster_that_stays_silent_is_reported() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.script = ["silent"] * int(UNREACHABLE_LIMIT_S + 2)
    with pytest.raises(ClusterUnreachable):
        watch(cluster)
