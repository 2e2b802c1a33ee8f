"""Many runs as rows: with few questions, and in numbers that programs can read."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from fake_cluster import FakeCluster

from trainyard.cli import show
from trainyard.cluster.kuberay import RayjobApi
from trainyard.submission.overview import (
    COLUMNS,
    columns_of,
    newest_of_each_run,
    row_of,
    run_statuses_of,
    wide_columns_text,
)
from trainyard.submission.status import run_status_of

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 1, 0, 0, tzinfo=timezone.utc)


class Counting(FakeCluster):
    """Counts its lists."""

    lists = 0

    def list(self, *arguments: Any, **options: Any) -> list[Object]:
        self.lists += 1
        return super().list(*arguments, **options)


def starting(cluster: FakeCluster, count: int) -> None:
    for number in range(count):
        job = cluster.add_job(f"r{number}-1", run=f"r{number}")
        job["status"]["jobDeploymentStatus"] = "Initializing"
        name = f"r{number}-1-abc-head"
        condition = {"type": "PodScheduled", "status": "False", "message": f"no room {number}"}
        labels = {"ray.io/cluster": f"r{number}-1-abc", "trainyard.io/run": f"r{number}"}
        cluster.objects["Pod", name] = {
            "metadata": {"name": name, "labels": labels},
            "status": {"phase": "Pending", "conditions": [condition]},
        }


def test_why_runs_do_not_start_is_one_question_however_many_they_are() -> None:
    cluster = Counting()
    starting(cluster, 50)
    jobs = RayjobApi(cluster).list_jobs()
    statuses = run_statuses_of(cluster, jobs)
    assert [run_status.message for run_status in statuses] == [
        f"r{number}-1-abc-head is not scheduled: no room {number}" for number in range(50)
    ]
    assert cluster.lists == 2


def test_a_pipe_gets_whole_rows_with_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    rows = [
        {"run": "a", "age": 75, "message": long},
        {"run": "bcd", "age": None, "message": "[y]\nz"},
    ]
    names = ("run", "age", "message")
    columns = [column for column in COLUMNS if column.name in names]
    show.submissions_table(rows, columns)
    assert capsys.readouterr().out.splitlines() == [
        "run  age   message", f"a    1:15  {long}", "bcd  -     [y] z"
    ]  # fmt: skip


def test_runs_that_started_need_no_question_more() -> None:
    cluster = Counting()
    jobs = [cluster.add_job(f"r{number}-1", status="RUNNING") for number in range(50)]
    assert {run_status.phase for run_status in run_statuses_of(cluster, jobs)} == {"running"}
    assert cluster.lists == 0


def test_of_each_run_the_last_submission_counts() -> None:
    cluster = FakeCluster()
    for name, run in (("b-1", "b"), ("a-1", "a"), ("a-2", "a")):
        cluster.add_job(name, run=run)
    last = newest_of_each_run(RayjobApi(cluster).list_jobs())
    assert [job["metadata"]["name"] for job in last] == ["a-2", "b-1"]


def test_the_same_name_in_another_namespace_is_another_run() -> None:
    cluster = FakeCluster()
    jobs = [cluster.add_job(name) for name in ("a-1", "a-2")]
    for job, namespace in zip(jobs, ("one", "two"), strict=True):
        job["metadata"]["namespace"] = namespace
    assert newest_of_each_run(jobs) == jobs


def test_a_row_has_numbers_and_what_is_not_known_is_none() -> None:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="RUNNING")
    row = row_of(job, run_status_of(job), NOW)
    assert (row["phase"], row["age"], row["duration"], row["nodes"]) == (
        "running",
        3600,
        3600,
        None,
    )
    job["status"] |= {
        "startTime": "2026-01-01T00:30:00Z",
        "endTime": "2026-01-01T00:40:00Z",
        "rayClusterStatus": {
            "readyWorkerReplicas": 1, "desiredWorkerReplicas": 2, "desiredGPU": "16"
        },
    }  # fmt: skip
    row = row_of(job, run_status_of(job), NOW)
    assert (row["age"], row["duration"], row["nodes"], row["gpus"]) == (3600, 600, "1/2", "16")


@pytest.mark.parametrize("table", ["list", "status"])
def test_tables_json_and_help_have_the_columns_of_the_registry(table: Any) -> None:
    job = FakeCluster().add_job("digits-1", status="RUNNING")
    names = [column.name for column in COLUMNS]
    assert list(row_of(job, run_status_of(job), NOW)) == names
    narrow = [column.name for column in columns_of(table, is_wide=False)]
    wide = [column.name for column in columns_of(table, is_wide=True)]
    assert set(narrow) < set(wide) < set(names)
    assert wide == [name for name in names if name in wide]
    assert wide_columns_text(table) == ", ".join(name for name in wide if name not in narrow)


def test_all_namespaces_add_the_namespace_to_the_table() -> None:
    columns = columns_of("list", is_wide=False, with_namespace=True)
    assert [column.name for column in columns][:2] == ["namespace", "run"]
