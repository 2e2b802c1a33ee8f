"""Submitting twice changes nothing; a run is live once; an ended one goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fake_cluster import FakeCluster

from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError
from trainyard.submission.submit import delete_and_wait, submit_rayjob

JOB: dict[str, Any] = {
    "kind": "RayJob",
    "metadata": {
        "name": "digits-1",
        "labels": {"app.kubernetes.io/managed-by": "trainyard", "trainyard.io/run": "digits"},
    },
}


def test_a_new_run_is_created() -> None:
    cluster = FakeCluster()
    assert submit_rayjob(RayjobApi(cluster), JOB) == "created"
    assert cluster.calls == [("create", "RayJob", "digits-1")]


def test_a_live_submission_is_found_and_left_alone() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="RUNNING")
    assert submit_rayjob(RayjobApi(cluster), JOB) == "live"
    assert cluster.calls == []


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_an_ended_submission_makes_room(status: str) -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status=status)
    assert submit_rayjob(RayjobApi(cluster), JOB) == "resubmitted"
    assert [call[0] for call in cluster.calls] == ["delete", "create"]


def test_a_run_that_is_live_otherwise_is_refused_with_the_remedy() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-0", status="RUNNING")
    with pytest.raises(ClusterError, match="live as digits-0") as raised:
        submit_rayjob(RayjobApi(cluster), JOB)
    assert "`trainyard stop digits -n team`" in str(raised.value)
    assert cluster.calls == []


def test_an_object_of_that_name_that_is_not_ours_is_refused() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="SUCCEEDED")["metadata"]["labels"].clear()
    with pytest.raises(ClusterError, match="is not ours"):
        submit_rayjob(RayjobApi(cluster), JOB)
    assert cluster.calls == []


class Race(FakeCluster):
    """Somebody else submits in the moment between our look and our RayJob."""

    def __init__(self, other: str, created: str) -> None:
        super().__init__()
        self.other, self.created = other, created

    def create(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        self.add_job(self.other)["metadata"]["creationTimestamp"] = self.created
        if self.other == body["metadata"]["name"]:
            raise ClusterError("409", reason="AlreadyExists")
        body = copy.deepcopy(body)
        body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:05Z"
        return super().create(body)


def test_the_same_run_file_submitted_twice_at_once_is_live() -> None:
    assert submit_rayjob(RayjobApi(Race("digits-1", "2026-01-01T00:00:05Z")), JOB) == "live"


@pytest.mark.parametrize(
    ("other", "created", "is_mine_the_first"),
    [
        ("digits-0", "2026-01-01T00:00:04Z", False),
        ("digits-0", "2026-01-01T00:00:06Z", True),
        # Within one second the name decides, on both sides alike.
        ("digits-0", "2026-01-01T00:00:05Z", False),
        ("digits-2", "2026-01-01T00:00:05Z", True),
    ],
)
def test_of_two_run_files_submitted_at_once_one_gives_way(
    other: str, created: str, is_mine_the_first: bool
) -> None:
    cluster = Race(other, created)
    if is_mine_the_first:
        assert submit_rayjob(RayjobApi(cluster), JOB) == "created"
    else:
        with pytest.raises(ClusterError, match="was taken back"):
            submit_rayjob(RayjobApi(cluster), JOB)
        assert ("delete", "RayJob", "digits-1") in cluster.calls
    assert ("delete", "RayJob", other) not in cluster.calls


def test_a_rayjob_that_does_not_go_points_to_the_operator() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.delete = lambda kind, name: None  # type: ignore[method-assign]
    now = iter(range(0, 10_000, 100))
    with pytest.raises(ClusterError, match="is still being deleted") as raised:
        delete_and_wait(
            RayjobApi(cluster), "digits-1", clock=lambda: float(next(now)), sleep=lambda _: None
        )
    assert "operator" in str(raised.value)


def test_a_run_begins_anew_once_the_old_submission_is_gone() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="SUCCEEDED")
    submit_rayjob(RayjobApi(cluster), JOB, lambda: cluster.calls.append(("set aside", "", "")))
    assert [call[0] for call in cluster.calls] == ["delete", "set aside", "create"]


@pytest.mark.parametrize("live", ["digits-0", "digits-1"])
def test_a_live_run_does_not_begin_anew(live: str) -> None:
    cluster = FakeCluster()
    cluster.add_job(live, status="RUNNING")
    with pytest.raises(ClusterError, match=f"live as {live}"):
        submit_rayjob(RayjobApi(cluster), JOB, lambda: pytest.fail("its folder was set aside"))
    assert cluster.calls == []


@pytest.mark.parametrize(("status", "is_forgotten"), [("FAILED", True), ("STOPPED", False)])
def test_the_time_of_a_failed_submission_is_not_counted_for_the_next(
    status: str, is_forgotten: bool
) -> None:
    cluster, forgotten = FakeCluster(), list[str]()
    ended = cluster.add_job("digits-1", status=status)
    ended.setdefault("spec", {})["activeDeadlineSeconds"] = 60
    job = JOB | {"spec": {"activeDeadlineSeconds": 60}}
    submit_rayjob(RayjobApi(cluster), job, forget_failure=lambda: forgotten.append("digits-1"))
    assert forgotten == ["digits-1"] * is_forgotten


@pytest.mark.parametrize(("retries_of_the_ended", "is_forgotten"), [(0, True), (2, False)])
def test_the_record_of_a_final_failure_is_withdrawn_if_the_retries_were_cancelled(
    retries_of_the_ended: int, is_forgotten: bool
) -> None:
    cluster, forgotten = FakeCluster(), list[str]()
    ended = cluster.add_job("digits-1", status="FAILED")
    ended.setdefault("spec", {})["backoffLimit"] = retries_of_the_ended
    job = JOB | {"spec": {"backoffLimit": 2}}
    submit_rayjob(RayjobApi(cluster), job, forget_failure=lambda: forgotten.append("digits-1"))
    assert forgotten == ["digits-1"] * is_forgotten
