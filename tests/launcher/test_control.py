"""A run is stopped with a checkpoint, gives its nodes back, and goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_cluster import FakeCluster, FakeProcess

from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError
from trainyard.submission.control import (
    STOP_LIMIT_S,
    WORKLOAD_LIMIT_S,
    StopResult,
    is_suspended,
    live_jobs,
    resume_job,
    stop_job,
    suspend_job,
)


class Clock:
    """Time that passes when somebody sleeps; then something may happen."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.now, self.cluster = 0.0, cluster

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.cluster.script:
            self.cluster.tick()


def stop(cluster: FakeCluster) -> StopResult:
    (job,) = live_jobs(RayjobApi(cluster), "digits")
    clock = Clock(cluster)
    return stop_job(cluster, RayjobApi(cluster), job, clock=clock, sleep=clock.sleep)


def running(*processes: FakeProcess) -> FakeCluster:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="RUNNING")["status"]["jobId"] = "digits-1-x"
    cluster.add_head("digits-1-abc", "")
    cluster.processes = list(processes)
    return cluster


@pytest.mark.parametrize(
    ("log", "step"),
    [("progress {}\nstopped: all is saved up to step 12\nerror: x", 12), ("", None)],
)
def test_a_running_driver_ends_before_its_rayjob_goes(log: str, step: int | None) -> None:
    cluster = running(FakeProcess())
    cluster.add_head("digits-1-abc", log)
    cluster.script = [("Running", "RUNNING"), ("Complete", "STOPPED")]
    assert stop(cluster) == StopResult(ended="in good order", step=step)
    ((pod, *command),) = cluster.commands
    assert (pod, command[:3], command[-1]) == (
        "digits-1-abc-head", ["ray", "job", "stop"], "digits-1-x"
    )  # fmt: skip
    assert cluster.script == []
    assert cluster.calls == [("delete", "RayJob", "digits-1")]


def test_a_driver_that_does_not_end_goes_with_its_rayjob() -> None:
    cluster = running(FakeProcess())
    cluster.script = [("Running", "RUNNING")] * int(2 * STOP_LIMIT_S)
    assert stop(cluster) == StopResult(ended="killed")
    assert cluster.calls == [("delete", "RayJob", "digits-1")]


def test_a_driver_that_cannot_be_asked_is_left_alone_with_the_remedy() -> None:
    cluster = running(FakeProcess(errors="Connection refused", exit_code=1))
    with pytest.raises(ClusterError, match="could not be asked to stop") as raised:
        stop(cluster)
    assert "Connection refused" in str(raised.value)
    assert "--now" in str(raised.value)
    assert cluster.calls == []


def test_a_run_without_a_driver_just_goes() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    assert stop(cluster) == StopResult(ended="not running")
    assert (cluster.commands, cluster.calls) == ([], [("delete", "RayJob", "digits-1")])


def test_only_live_submissions_of_the_run_are_touched() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-0", status="SUCCEEDED")
    cluster.add_job("digits-1", status="RUNNING")
    cluster.add_job("other-1", status="RUNNING", run="other")
    found = live_jobs(RayjobApi(cluster), "digits")
    assert [job["metadata"]["name"] for job in found] == ["digits-1"]


def test_suspending_takes_the_form_that_kuberay_allows() -> None:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="RUNNING")
    job["spec"] = {"shutdownAfterJobFinishes": False, "deletionStrategy": {"deletionRules": []}}
    suspend_job(cluster, job)
    assert job["spec"] == {"suspend": True, "shutdownAfterJobFinishes": True}
    assert is_suspended(cluster, job)
    resume_job(cluster, job)
    assert job["spec"] == {"suspend": False, "shutdownAfterJobFinishes": True}
    assert not is_suspended(cluster, job)


def queued() -> tuple[FakeCluster, dict[str, object]]:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="RUNNING")
    job["spec"] = {"suspend": False}
    job["metadata"]["uid"] = "u1"
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    return cluster, job


def add_workload(cluster: FakeCluster, uid: str) -> None:
    metadata = {"name": f"w-{uid}", "ownerReferences": [{"uid": uid}]}
    cluster.objects["Workload", f"w-{uid}"] = {"metadata": metadata, "spec": {}}


def test_in_a_queue_of_kueue_its_workload_is_told() -> None:
    cluster, job = queued()
    for uid in ("u0", "u1"):
        add_workload(cluster, uid)
    job["spec"] = {"suspend": True}
    assert not is_suspended(cluster, job)  # it only waits
    suspend_job(cluster, job)
    assert cluster.calls == [("patch", "Workload", "w-u1")]
    assert cluster.objects["Workload", "w-u1"]["spec"] == {"active": False}
    assert is_suspended(cluster, job)
    resume_job(cluster, job)
    assert cluster.objects["Workload", "w-u1"]["spec"] == {"active": True}
    assert not is_suspended(cluster, job)


@pytest.mark.parametrize("change", [suspend_job, resume_job])
def test_a_run_that_kueue_could_not_start_is_not_suspended_or_resumed(
    change: Callable[..., None],
) -> None:
    cluster, job = queued()
    add_workload(cluster, "u1")
    finished = {"type": "Finished", "status": "True", "reason": "FailedToStart", "message": "no"}
    cluster.objects["Workload", "w-u1"]["status"] = {"conditions": [finished]}
    with pytest.raises(ClusterError, match=r"could not start run digits, .*: no") as raised:
        change(cluster, job)
    assert "trainyard stop digits" in str(raised.value)
    assert cluster.calls == []


def test_a_new_rayjob_is_suspended_as_soon_as_kueue_has_created_its_workload() -> None:
    cluster, job = queued()
    clock = Clock(cluster)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now == 3:
            add_workload(cluster, "u1")

    assert not is_suspended(cluster, job)
    suspend_job(cluster, job, clock=clock, sleep=sleep)
    assert clock.now == 3
    assert is_suspended(cluster, job)


def test_a_rayjob_for_which_kueue_creates_no_workload_is_an_error() -> None:
    cluster, job = queued()
    clock = Clock(cluster)
    with pytest.raises(ClusterError, match="no Workload for it within 15 s"):
        suspend_job(cluster, job, clock=clock, sleep=clock.sleep)
    assert clock.now == WORKLOAD_LIMIT_S
