"""From RayJobs to rows: the submissions of a namespace as people and programs read them.

`COLUMNS` is the one list of what a row has. The tables of `trainyard list` and `status`, their JSON and the
help of `--output` are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from trainyard.labels import RUN_LABEL
from trainyard.submission.queue_wait import with_queue_waits
from trainyard.submission.status import RunStatus, run_status_of, with_pending_reason

Object = dict[str, Any]
Table = Literal["list", "status"]
"""The commands that print submissions as a table."""

PENDING_PODS_LIMIT = 500
"""How many pending pods are asked for in one request, however many runs there are."""


class PodLister(Protocol):
    """The methods of `Cluster` with which pending pods and Kueue's objects are read."""

    def get(self, kind: str, name: str) -> Object | None: ...
    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        limit: int | None = None,
        cached: bool = False,
    ) -> list[Object]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionFacts:
    """What the value of a column is computed from."""

    job: Object
    """The RayJob."""
    run_status: RunStatus
    """How the submission stands."""
    now: datetime
    """The time to which ages are computed."""

    @property
    def metadata(self) -> Object:
        """The `metadata` of the RayJob."""
        metadata: Object = self.job["metadata"]
        return metadata

    @property
    def status(self) -> Object:
        """The `status` of the RayJob; empty before the operator has seen it."""
        status: Object = self.job.get("status", {})
        return status

    @property
    def cluster_status(self) -> Object:
        """The status of the RayCluster, as the RayJob repeats it."""
        status: Object = self.status.get("rayClusterStatus") or {}
        return status

    @property
    def created(self) -> str:
        """The time at which the RayJob was created, as text of the Kubernetes API."""
        return str(self.metadata["creationTimestamp"])

    def nodes(self) -> str | None:
        """Return the ready and the desired worker pods as `1/2`, or None without a RayCluster."""
        desired = self.cluster_status.get("desiredWorkerReplicas")
        return (
            None
            if desired is None
            else f"{self.cluster_status.get('readyWorkerReplicas', 0)}/{desired}"
        )

    def duration_s(self) -> int:
        """Return the seconds from the start of the RayJob to its end, or until now."""
        ended = self.status.get("endTime")
        began = self.status.get("startTime") or self.created
        return _seconds(began, _parse_time(ended) if ended else self.now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of the tables of submissions, and one key of their JSON."""

    name: str
    """The key in JSON and the heading of the column."""
    meaning: str
    """What the column shows, as part of a sentence."""
    value: Callable[[SubmissionFacts], Any]
    """Computes the value: a text, a number, or None if it is not known."""
    shown_by: tuple[Table, ...] = ()
    """The commands whose table has this column without `--output wide`."""
    is_in_tables: bool = True
    """Whether the wide tables have this column; else only JSON and YAML have it."""
    is_duration: bool = False
    """Whether the value is a number of seconds, which a table shows as hours and minutes."""


COLUMNS: tuple[Column, ...] = (
    Column(
        name="namespace",
        meaning="the namespace",
        value=lambda facts: facts.metadata.get("namespace", ""),
        is_in_tables=False,
    ),
    Column(
        name="run",
        meaning="the name of the run",
        value=lambda facts: facts.metadata["labels"][RUN_LABEL],
        shown_by=("list", "status"),
    ),
    Column(
        name="phase",
        meaning="how the submission stands",
        value=lambda facts: facts.run_status.phase,
        shown_by=("list", "status"),
    ),
    Column(
        name="attempts",
        meaning="how many attempts have begun",
        value=lambda facts: facts.run_status.attempts,
        shown_by=("list", "status"),
    ),
    Column(
        name="nodes",
        meaning="ready and desired worker pods",
        value=lambda facts: facts.nodes(),
        shown_by=("list",),
    ),
    Column(
        name="gpus",
        meaning="the GPUs of the RayCluster",
        value=lambda facts: facts.cluster_status.get("desiredGPU"),
    ),
    Column(
        name="created",
        meaning="when the RayJob was created",
        value=lambda facts: facts.created,
        shown_by=("status",),
    ),
    Column(
        name="age",
        meaning="the time since then",
        value=lambda facts: _seconds(facts.created, facts.now),
        shown_by=("list",),
        is_duration=True,
    ),
    Column(
        name="duration",
        meaning="the time from start to end, or until now",
        value=lambda facts: facts.duration_s(),
        shown_by=("list",),
        is_duration=True,
    ),
    Column(
        name="submission",
        meaning="the name of the RayJob",
        value=lambda facts: facts.run_status.submission,
        shown_by=("list", "status"),
    ),
    Column(
        name="ray_cluster",
        meaning="the name of the RayCluster",
        value=lambda facts: facts.status.get("rayClusterName"),
    ),
    Column(
        name="job",
        meaning="Ray's id of the job",
        value=lambda facts: facts.status.get("jobId"),
    ),
    Column(
        name="message",
        meaning="why the submission waits or has failed",
        value=lambda facts: facts.run_status.message,
        shown_by=("list", "status"),
    ),
    Column(
        name="progress",
        meaning="the newest progress record",
        value=lambda facts: facts.run_status.progress,
        is_in_tables=False,
    ),
)
"""All columns, in the order in which tables and JSON have them."""


def columns_of(table: Table, *, is_wide: bool, with_namespace: bool = False) -> list[Column]:
    """Return the columns of a table: those that it shows by default, or all for `--output wide`."""
    return [
        column
        for column in COLUMNS
        if (with_namespace and column.name == "namespace")
        or (column.is_in_tables if is_wide else table in column.shown_by)
    ]


def wide_columns_text(table: Table) -> str:
    """Return the names of the columns that `--output wide` adds to a table, for its help text."""
    narrow = columns_of(table, is_wide=False)
    added = [column for column in columns_of(table, is_wide=True) if column not in narrow]
    return ", ".join(column.name for column in added)


def run_statuses_of(cluster: PodLister, jobs: list[Object]) -> list[RunStatus]:
    """Return the status of each submission, with the reason why those that are starting or queued wait.

    The reasons cost few requests for all submissions together.
    """
    statuses = with_queue_waits(cluster, jobs, map(run_status_of, jobs))
    if not any(run_status.phase == "starting" for run_status in statuses):
        return statuses
    pending = cluster.list(
        "Pod",
        {RUN_LABEL: None},
        fields="status.phase=Pending",
        limit=PENDING_PODS_LIMIT,
        cached=True,
    )
    by_cluster: dict[str, list[Object]] = {}
    for pod in pending:
        by_cluster.setdefault(pod["metadata"]["labels"].get("ray.io/cluster", ""), []).append(pod)
    completed = []
    for run_status, job in zip(statuses, jobs, strict=True):
        pods = by_cluster.get(job.get("status", {}).get("rayClusterName", ""), [])
        completed.append(with_pending_reason(run_status, job, pods))
    return completed


def newest_of_each_run(jobs: list[Object]) -> list[Object]:
    """Return the newest submission of each run, sorted by namespace and name; `jobs` are oldest first."""
    newest = {
        (job["metadata"].get("namespace", ""), job["metadata"]["labels"][RUN_LABEL]): job
        for job in jobs
    }
    return [newest[key] for key in sorted(newest)]


def row_of(job: Object, run_status: RunStatus, now: datetime) -> Object:
    """Return the value of each column for a submission; durations are in seconds."""
    facts = SubmissionFacts(job=job, run_status=run_status, now=now)
    return {column.name: column.value(facts) for column in COLUMNS}


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _seconds(since: str, until: datetime) -> int:
    return max(int((until - _parse_time(since)).total_seconds()), 0)
