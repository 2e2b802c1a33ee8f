"""Submitting twice changes nothing; a run is live once; an ended one goes on."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import FakeCluster

from launcher.errors import ClusterError
from launcher.kuberay import RayjobApi
from launcher.platform import Platform
from launcher.reader import read_folder, reader_pod
from launcher.submit import delete_and_wait, stop_run, submit_run

JOB: dict[str, Any] = {
    "kind": "RayJob",
    "metadata": {
        "name": "digits-1",
        "labels": {"app.kubernetes.io/managed-by": "trainyard", "trainyard.io/run": "digits"},
    },
}


def test_a_new_run_is_created() -> None:
    cluster = FakeCluster()
    assert submit_run(RayjobApi(cluster), JOB) == "created"
    assert cluster.calls == [("create", "RayJob", "digits-1")]


def test_a_live_submission_is_found_and_left_alone() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="RUNNING")
    assert submit_run(RayjobApi(cluster), JOB) == "live"
    assert cluster.calls == []


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_an_ended_submission_makes_room(status: str) -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status=status)
    assert submit_run(RayjobApi(cluster), JOB) == "resubmitted"
    assert [call[0] for call in cluster.calls] == ["delete", "create"]


def test_a_run_that_is_live_otherwise_is_refused_with_the_remedy() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-0", status="RUNNING")
    with pytest.raises(ClusterError, match="live as digits-0") as raised:
        submit_run(RayjobApi(cluster), JOB)
    assert "trainyard stop digits" in str(raised.value)
    assert cluster.calls == []


def test_an_object_of_that_name_that_is_not_ours_is_refused() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1", status="SUCCEEDED")["metadata"]["labels"].clear()
    with pytest.raises(ClusterError, match="is not ours"):
        submit_run(RayjobApi(cluster), JOB)
    assert cluster.calls == []


def test_stop_deletes_the_live_submissions_of_the_run_alone() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-0", status="SUCCEEDED")
    cluster.add_job("digits-1", status="RUNNING")
    cluster.add_job("other-1", status="RUNNING", run="other")
    assert stop_run(RayjobApi(cluster), "digits") == ["digits-1"]
    assert cluster.calls == [("delete", "RayJob", "digits-1")]


def test_a_rayjob_that_does_not_go_points_to_the_operator() -> None:
    cluster = FakeCluster()
    cluster.add_job("digits-1")
    cluster.delete = lambda kind, name: None  # type: ignore[method-assign]
    now = iter(range(0, 10_000, 100))
    with pytest.raises(ClusterError, match="is still there") as raised:
        delete_and_wait(
            RayjobApi(cluster), "digits-1", clock=lambda: float(next(now)), sleep=lambda _: None
        )
    assert "operator" in str(raised.value)


class OneReader(FakeCluster):
    """A cluster whose reader pods end at once with this exit code."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__()
        self.code, self.text = code, text

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        ended = {"name": "reader", "state": {"terminated": {"exitCode": self.code}}}
        self.logs[body["metadata"]["name"]] = self.text
        return super().create(body | {"status": {"containerStatuses": [ended]}})


@pytest.mark.parametrize(("code", "text", "read"), [(0, "{}", "{}"), (4, "no such file", None)])
def test_a_file_is_read_by_a_pod_that_goes_again(
    platform: Platform, code: int, text: str, read: str | None
) -> None:
    cluster = OneReader(code, text)
    assert read_folder(cluster, platform, "digits", "summary.json") == read
    assert cluster.objects == {}


def test_a_reader_that_fails_tells_its_last_lines(platform: Platform) -> None:
    cluster = OneReader(1, "Traceback\nPermissionError: /mnt")
    with pytest.raises(ClusterError, match="failed") as raised:
        read_folder(cluster, platform, "digits", "summary.json")
    assert "PermissionError: /mnt" in str(raised.value)
    assert cluster.objects == {}


def test_the_reader_knows_the_storage_and_the_file(platform: Platform) -> None:
    (container,) = reader_pod(platform, "digits", "summary.json")["spec"]["containers"]
    assert container["args"] == ["--path", "/mnt/trainyard", "digits", "summary.json"]
    assert container["image"] == platform.image
