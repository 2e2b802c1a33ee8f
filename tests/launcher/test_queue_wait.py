"""Where a run stands in a queue of Kueue, and why it is not admitted."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import FakeCluster

from trainyard.errors import ClusterError
from trainyard.submission.current_status import current_status
from trainyard.submission.overview import run_statuses_of
from trainyard.submission.queue_wait import exceeds_all_quota, shortened, unfinished
from trainyard.submission.watch import StatusTracker

WAITING = (
    "couldn't assign flavors to pod set head: insufficient unused quota for cpu in flavor heads, 100m more "
    "needed, insufficient unused quota for memory in flavor heads, 3080Mi more needed; couldn't assign "
    "flavors to pod set gpu: insufficient quota for nvidia.com/gpu in flavor heads, previously considered "
    "podsets requests (0) + current podset request (8) > maximum capacity (0), insufficient unused quota "
    "for nvidia.com/gpu in flavor gpu, 8 more needed"
)
TOO_LARGE = (
    "couldn't assign flavors to pod set gpu: insufficient quota for nvidia.com/gpu in flavor gpu, "
    "previously considered podsets requests (0) + current podset request (80) > maximum capacity (16)"
)


def queued(**spec: Any) -> tuple[FakeCluster, dict[str, Any]]:
    """A run that waits as second in queue `team`, and its Workload of another size before."""
    cluster = FakeCluster()
    job = cluster.add_job("digits-1")
    job["spec"] = {"suspend": True}
    job["metadata"] |= {"uid": "u1"}
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    job["status"]["jobDeploymentStatus"] = "Suspended"
    for name, kind, second in (("old", "Finished", 1), ("new", "QuotaReserved", 2)):
        status = "True" if kind == "Finished" else "False"
        cluster.objects["Workload", name] = {
            "metadata": {
                "name": name,
                "creationTimestamp": f"2026-01-01T00:00:0{second}Z",
                "ownerReferences": [{"uid": "u1"}],
            },
            "spec": spec,
            "status": {"conditions": [{"type": kind, "status": status, "message": TOO_LARGE}]},
        }
    items = [{"metadata": {"name": "new"}, "positionInLocalQueue": 1}]
    cluster.objects["PendingWorkloads", "team/pendingworkloads"] = {"items": items, "metadata": {}}
    return cluster, job


def test_a_queued_run_says_where_it_waits_and_why() -> None:
    cluster, job = queued()
    status = current_status(cluster, job)
    assert status.phase == "queued"
    assert status.message == (
        "waits in Kueue queue team at position 2: 80 nvidia.com/gpu asked for, flavor gpu has 16 at most"
    )
    assert run_statuses_of(cluster, [job]) == [status]
    tracker = StatusTracker("digits-1")
    assert tracker.update_job({"digits-1": job}).phase == "suspended"


def test_a_suspended_run_does_not_wait() -> None:
    cluster, job = queued(active=False)
    status = current_status(cluster, job)
    assert (status.phase, status.message) == ("suspended", "suspended until it is resumed")


def test_a_run_stays_suspended_where_the_queue_may_not_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, job = queued()

    def refuse(kind: str, *words: object, **options: object) -> None:
        raise ClusterError("no", reason="Forbidden")

    monkeypatch.setattr(cluster, "list", refuse)
    assert current_status(cluster, job).phase == "suspended"


def test_of_several_workloads_those_that_are_finished_do_not_count() -> None:
    cluster, job = queued()
    (found,) = unfinished(cluster.list("Workload"), job)
    assert found["metadata"]["name"] == "new"


def test_a_run_that_kueue_could_not_start_says_so() -> None:
    cluster, job = queued()
    newest = cluster.objects["Workload", "new"]["status"]["conditions"]
    newest[:] = [{"type": "Finished", "status": "True", "reason": "FailedToStart", "message": "no"}]
    assert unfinished(cluster.list("Workload"), job) == []
    status = current_status(cluster, job)
    assert status.message == "waits in Kueue queue team: Kueue could not start it: no"


def test_a_long_message_is_shortened_to_its_first_reasons() -> None:
    assert shortened(WAITING) == (
        "8 nvidia.com/gpu asked for, flavor heads has 0 at most; 100m more cpu needed in flavor heads; "
        "and 2 more"
    )
    assert shortened("The workload\n is deactivated") == "The workload is deactivated"
    assert len(shortened("x" * 900)) == 200


def test_a_run_is_too_large_if_no_flavor_can_ever_hold_it() -> None:
    assert exceeds_all_quota(TOO_LARGE)
    assert not exceeds_all_quota(WAITING)
    assert not exceeds_all_quota("The workload is deactivated")
