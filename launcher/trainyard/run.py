"""A run on a cluster or on this machine: its status, the cause of its failure, its result."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.errors import ClusterError, ConfigError, RunFailed
from trainyard.local.results import Files, LocalFiles, Result, read_result
from trainyard.submission.current_status import current_status, head_pod
from trainyard.submission.images import recording_images
from trainyard.submission.status import ENDED, Phase, RunStatus, with_cause_of_stop
from trainyard.submission.watch import cancelling_retries, watch_submission
from trainyard_trainer.config.location import local_problem
from trainyard_trainer.run_files import lease, names

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.diagnosis.snapshot import Snapshot
    from trainyard.platform import Platform
    from trainyard.submission.run_folder.remote_folder import RemoteFolder

Object = dict[str, Any]

NAMESPACE = "trainyard"
"""The default namespace."""

POLL_S = 1.0
"""Seconds between two reads of the folder of a run on this machine."""


class Run:
    """A run by its name, in a namespace of a cluster or in a storage folder of this machine.

    Creating the object reads nothing; each method reads the current state.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        storage: str | Path | None = None,
        context: str | None = None,
    ) -> None:
        """Name a run; without `namespace` and `storage` it is in the namespace `trainyard` of the cluster.

        `context` is the kubeconfig context of that cluster, by default the current one. Raises ConfigError if
        `storage` is given together with one of the others, or if a name is not valid.
        """
        from trainyard.run_file.validation import check_name

        if storage is not None:
            for what, value in (("namespace", namespace), ("context", context)):
                if value is not None:
                    raise ConfigError(
                        f"run {name} has both {what} = {value} and storage = {storage}",
                        "A run is on a cluster, or on this machine: name one of them.",
                    )
        self.name = check_name(name, "name")
        self.namespace: str | None = None
        self.context = context
        self.storage: Path | None = None
        if storage is None:
            self.namespace = check_namespace(NAMESPACE if namespace is None else namespace)
        else:
            self.storage = local_storage(storage)

    def __repr__(self) -> str:
        where = (
            f"storage={str(self.storage)!r}" if self.storage else f"namespace={self.namespace!r}"
        )
        where += "" if self.context is None else f", context={self.context!r}"
        return f"Run({self.name!r}, {where})"

    def status(self) -> RunStatus:
        """Return how the run stands now: `phase`, `progress`, `summary` and more.

        Raises ConfigError if there is no such run, ClusterError if the cluster refuses.
        """
        return self._home().current_status()

    def watch(self) -> Iterator[RunStatus]:
        """Yield the status on each change until the run has ended. Raises the errors of `status`."""
        return self._home().statuses()

    def result(self) -> Result:
        """Wait for the end of the run and return its result.

        Raises RunFailed with cause and remedy if it failed or was stopped, and the errors of `status`.
        """
        home = self._home()
        last = None
        for run_status in home.statuses():
            last = run_status
        assert last is not None
        home.require_success(last)
        return read_result(self.name, home.path, home.files)

    def _home(self) -> OnCluster | OnThisMachine:
        if self.storage is not None:
            return OnThisMachine(self.storage, self.name)
        from trainyard.cluster.cluster import Cluster

        assert self.namespace is not None
        return OnCluster(Cluster(self.namespace, context=self.context), self.name)


class OnCluster:
    """A run in a namespace of a cluster: its newest submission, and its folder."""

    def __init__(self, cluster: Cluster, run: str) -> None:
        self._cluster = cluster
        self._run = run

    @property
    def path(self) -> str:
        """The path of the run's folder in its pods."""
        return f"{published_platform(self._cluster).storage.path.rstrip('/')}/{self._run}"

    def current_status(self) -> RunStatus:
        job = last_job(self._cluster, self._run)
        if job is None:
            return self._kept()
        run_status = current_status(self._cluster, job)
        if not run_status.ran:
            return run_status
        summary = summary_of(self._cluster, self._run, run_status)
        error = None if summary is None else summary["error"]
        return with_cause_of_stop(replace(run_status, summary=summary), error)

    def statuses(self) -> Iterator[RunStatus]:
        job = last_job(self._cluster, self._run)
        if job is None:
            yield self._kept()
        else:
            submission = job["metadata"]["name"]
            statuses = watch_submission(self._cluster, submission, self._run)
            statuses = cancelling_retries(self._cluster, submission, statuses)
            folder = partial(running_folder, self._cluster, self._run)
            yield from recording_images(self._cluster, self._run, statuses, folder)

    def require_success(self, last: RunStatus) -> None:
        require_success(self._cluster, self._run, last)

    def files(self) -> AbstractContextManager[Files]:
        head = head_of(self._cluster, last_job(self._cluster, self._run))
        return folder_of(self._cluster, self._run, head)

    def _kept(self) -> RunStatus:
        """Return the status of a run whose RayJob was deleted. Raises ConfigError if it has no folder."""
        summary = summary_of(self._cluster, self._run, None)
        if summary is None:
            raise no_run(self._run, self._cluster)
        return ended(self._run, summary)


class OnThisMachine:
    """A run whose folder is on this machine."""

    def __init__(self, storage: Path, run: str) -> None:
        self._storage = storage
        self._run = run
        self._files = LocalFiles(storage / run)

    @property
    def path(self) -> str:
        """The path of the run's folder."""
        return str(self._files.root)

    def current_status(self) -> RunStatus:
        if not self._files.root.is_dir():
            there = sorted(path.name for path in self._storage.glob("*/") if path.is_dir())
            raise ConfigError(
                f"there is no run {self._run} in {self._storage}",
                f"Runs there: {', '.join(there)}." if there else "Name its storage.",
            )
        summary, progress = self._record(names.SUMMARY), self._record(names.PROGRESS)
        if summary is not None:
            return replace(ended(self._run, summary), progress=progress)
        phase: Phase = "running" if self._is_alive() else "stopped"
        return RunStatus(submission=self._run, phase=phase, ran=True, progress=progress)

    def statuses(self, sleep: Callable[[float], None] = time.sleep) -> Iterator[RunStatus]:
        before = None
        while True:
            run_status = self.current_status()
            if run_status != before:
                yield run_status
            if run_status.phase in ENDED:
                return
            before = run_status
            sleep(POLL_S)

    def require_success(self, last: RunStatus) -> None:
        if last.phase == "stopped" and last.message:
            raise RunFailed(f"run {self._run} was stopped", last.message)
        if last.phase == "stopped":
            raise RunFailed(
                f"run {self._run} has not ended, and no process trains it",
                "Train it again: it resumes from its last checkpoint.",
            )
        if last.phase == "failed":
            raise RunFailed(
                f"run {self._run} failed", last.message, f"Its logs are in {self.path}/logs."
            )

    def files(self) -> AbstractContextManager[Files]:
        return nullcontext(self._files)

    def _record(self, file: str) -> Object | None:
        text = self._files.read(file)
        return None if text is None else json.loads(text)

    def _is_alive(self) -> bool:
        """Return whether the newest attempt has not ended and its heartbeat is recent."""
        root = self._files.root
        attempts = lease.attempts_of(self._files.files())
        if not attempts or (root / lease.ended_file(attempts[-1])).exists():
            return False
        heartbeat = root / lease.heartbeat_file(attempts[-1])
        return heartbeat.exists() and time.time() - heartbeat.stat().st_mtime < lease.STALE_S


def local_storage(storage: str | Path) -> Path:
    """Return the folder with the runs of this machine. Raises ConfigError for a URL."""
    if local_problem(str(storage)) is not None:
        raise ConfigError(
            f"storage = {storage}: must be a folder of this machine",
            "Training on this machine keeps its runs in a folder. For a bucket, submit the run to a cluster "
            "whose chart values set storage.s3, or mount the bucket as a folder.",
        )
    return Path(storage).resolve()


def ended(run: str, summary: Object) -> RunStatus:
    """Return the status of a run that has ended, from its summary."""
    return RunStatus(
        submission=run,
        phase=summary["outcome"],
        ran=True,
        attempts=summary["attempts"],
        message=summary["error"] or "",
        summary=summary,
    )


# Functions that read a run on a cluster.


def check_namespace(namespace: str, what: str = "namespace") -> str:
    """Return a namespace if its name is valid. Raises ConfigError."""
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        return namespace
    raise ConfigError(
        f"{what} = {namespace!r}: must be at most 63 lower case letters, digits and dashes, "
        "with no dash at either end"
    )


def no_run(name: str, cluster: Cluster) -> ConfigError:
    """Return the error for a run that does not exist in the namespace."""
    return ConfigError(
        f"there is no run {name} in namespace {cluster.namespace}",
        f"`trainyard list {cluster.options}` lists the runs there.",
    )


def published_platform(cluster: Cluster) -> Platform:
    """Read the platform that the chart has published in the namespace. Raises LauncherError."""
    from trainyard.platform import CONFIG_MAP, platform_of_config_map

    return platform_of_config_map(cluster.get("ConfigMap", CONFIG_MAP), cluster.namespace)


def last_job(cluster: Cluster, name: str) -> Object | None:
    """Return the newest RayJob of a run, or None."""
    from trainyard.cluster.kuberay import RayjobApi

    jobs = RayjobApi(cluster).list_jobs(name, cached=True)
    return jobs[-1] if jobs else None


def head_of(cluster: Cluster, job: Object | None) -> str | None:
    """Return the name of the running head pod of a submission, or None."""
    ray_cluster = "" if job is None else job.get("status", {}).get("rayClusterName", "")
    return head_pod(cluster, ray_cluster) if ray_cluster else None


def folder_of(
    cluster: Cluster, name: str, head: str | None = None
) -> AbstractContextManager[RemoteFolder]:
    """Open a run's folder, through its head pod if there is one."""
    from trainyard.submission.run_folder.reader_pod import open_folder

    return open_folder(cluster, published_platform(cluster), name, head)


def running_folder(cluster: Cluster, run: str) -> AbstractContextManager[RemoteFolder]:
    """Open the folder of a running run through its head pod. Raises ClusterError without a head pod."""
    head = head_of(cluster, last_job(cluster, run))
    if head is None:
        raise ClusterError(f"the head pod of run {run} is gone", reason="NotFound")
    return folder_of(cluster, run, head)


def summary_of(cluster: Cluster, name: str, last: RunStatus | None) -> Object | None:
    """Return the summary of a run, from its status or from its folder; None if the run has none yet."""
    if last is not None and (last.summary is not None or last.phase not in ENDED):
        return last.summary
    with folder_of(cluster, name) as folder:
        text = folder.read(names.SUMMARY)
    return None if text is None else json.loads(text)


def require_success(cluster: Cluster, run: str, last: RunStatus) -> None:
    """Raise RunFailed with cause and remedy if a run was stopped or has failed."""
    logs = f"Logs: `trainyard logs {run} {cluster.options}`."
    if last.phase == "stopped":
        raise RunFailed(f"run {run} was stopped", *filter(None, [last.message]), logs)
    if last.phase == "failed":
        raise RunFailed(f"run {run} failed", *why(cluster, run), logs)


def snapshot_of(cluster: Cluster, run: str) -> Snapshot:
    """Read the current state of a run and of its cluster. Raises ConfigError if there is no such run."""
    from trainyard.diagnosis.gather import gather

    snapshot = gather(
        cluster,
        run,
        now=datetime.now(timezone.utc),
        open_folder=lambda: folder_of(cluster, run),
    )
    is_known = snapshot.log or snapshot.summary or snapshot.missing_kinds or snapshot.unread
    if snapshot.job is None and not is_known:
        raise no_run(run, cluster)
    return snapshot


def why(cluster: Cluster, run: str) -> list[str]:
    """Return the cause of a failed run, the remedy, and where to find the evidence."""
    from trainyard.diagnosis.catalogue import explain

    more = f"Where it shows: `trainyard explain {run} {cluster.options}`."
    explanation = explain(snapshot_of(cluster, run))
    if explanation.finding is None:
        return [*(seen.text for seen in explanation.observations[:1]), more]
    return [explanation.finding.cause, explanation.finding.remedy, more]
