"""The run of a drill: record its statuses and pods, and locate its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from trainyard.cluster.cluster import Cluster
from trainyard.cluster.follow import follow
from trainyard.cluster.kuberay import RayjobApi
from trainyard.drills.strikes import Target
from trainyard.drills.timeline import Observation, PodLife
from trainyard.errors import ClusterError, RunFailed
from trainyard.labels import RUN_LABEL
from trainyard.platform import Platform
from trainyard.submission.current_status import HEAD_CONTAINER, head_pod
from trainyard.submission.run_folder.remote_folder import RemoteFolder
from trainyard.submission.status import RunStatus
from trainyard.submission.submit import submit_rayjob
from trainyard.submission.watch import watch_submission
from trainyard.submission.workers import locate_worker
from trainyard_trainer.config.trainer_config import TrainerConfig

Object = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillJob:
    """The run of a drill, ready to be submitted."""

    run: str
    config: TrainerConfig
    rayjob: Object

    @property
    def name(self) -> str:
        """The name of the RayJob."""
        return str(self.rayjob["metadata"]["name"])


@dataclass(slots=True)
class DrillRecorder:
    """A recorder of the statuses and pods of a run, with times by the clock of the pods."""

    offset_s: float = 0.0
    seen: list[Observation] = field(default_factory=list)
    pods: dict[str, PodLife] = field(default_factory=dict)
    clusters: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, cluster: Cluster, run: str) -> DrillRecorder:
        """Return a recorder that follows the run's pods in a daemon thread."""
        recorder = cls()
        threading.Thread(target=recorder._follow_pods, args=(cluster, run), daemon=True).start()
        return recorder

    def now(self) -> float:
        """Return the current time by the clock of the pods."""
        return time.time() + self.offset_s

    def note_status(self, run_status: RunStatus) -> None:
        """Record a status with the current time."""
        step = None if run_status.progress is None else int(run_status.progress["step"])
        self.seen.append(
            Observation(
                time=self.now(), phase=run_status.phase, message=run_status.message, step=step
            )
        )

    def _follow_pods(self, cluster: Cluster, run: str) -> None:
        labels = {RUN_LABEL: run, "ray.io/is-ray-node": "yes"}
        for pods in follow(cluster, "Pod", labels):
            self.note_pods(pods)

    def note_pods(self, pods: Mapping[str, Object]) -> None:
        """Record the run's pods as they are now, by name; those that are not among them are gone."""
        for pod in pods.values():
            self._note_pod(pod)
        for name in self.pods.keys() - pods.keys():
            if self.pods[name].gone is None:
                self.pods[name] = replace(self.pods[name], gone=self.now())

    def _note_pod(self, pod: Object) -> None:
        metadata, status = pod["metadata"], pod.get("status", {})
        name, now = metadata["name"], self.now()
        self.clusters.add(metadata["labels"].get("ray.io/cluster", ""))
        life = self.pods.get(name) or PodLife(
            name=name, kind=metadata["labels"]["ray.io/node-type"], created=now
        )
        states = [each["state"] for each in status.get("containerStatuses", [])]
        if life.started is None and any("running" in state for state in states):
            life = replace(life, started=now)
        ready = [each["status"] for each in status.get("conditions", []) if each["type"] == "Ready"]
        if life.ready is None and ready == ["True"]:
            life = replace(life, ready=now)
        self.pods[name] = life


class DrillRun:
    """The observation of a run to its end, even if a fault deletes its RayJob for a while."""

    def __init__(
        self, cluster: Cluster, platform: Platform, job: DrillJob, recorder: DrillRecorder, say: Say
    ) -> None:
        self.job = job
        self.strike: Future[None] | None = None
        """The injection of the newest fault; None if there was none yet."""
        self._cluster = cluster
        self._platform = platform
        self.recorder = recorder
        self.say = say

    def statuses(self) -> Iterator[RunStatus]:
        """Yield the statuses that `watch` shows, also of the next RayJob if a fault deletes the first one."""
        while True:
            try:
                for run_status in watch_submission(self._cluster, self.job.name, self.job.run):
                    self.recorder.note_status(run_status)
                    yield run_status
                return
            except RunFailed as error:
                if self.strike is None:
                    raise
                self.recorder.seen.append(
                    Observation(time=self.recorder.now(), phase="stopped", message=error.what)
                )
                self.strike.result()

    def locate_target(self) -> Target:
        """Locate the pods and processes of the run, and read the clock of its head pod."""
        job = RayjobApi(self._cluster).get_job(self.job.name)
        head = None if job is None else head_pod(self._cluster, job["status"]["rayClusterName"])
        if head is None:
            raise ClusterError(f"run {self.job.run} is training but has no head pod")
        workers = RemoteFolder(
            self._cluster, self._platform, self.job.run, head, HEAD_CONTAINER
        ).workers()
        target = Target(
            cluster=self._cluster,
            run=self.job.run,
            job=self.job.name,
            head=head,
            workers=[
                locate_worker(self._cluster, self.job.run, workers, rank)
                for rank in range(len(workers))
            ],
            processes=[each["process"] for each in workers],
            resubmit=lambda: _submit(self._cluster, self.job),
            say=self.say,
        )
        before = time.time()
        clock = float(target.inside(head, HEAD_CONTAINER, "date", "+%s.%N"))
        self.recorder.offset_s = clock - (before + time.time()) / 2
        return target


def _submit(cluster: Cluster, job: DrillJob) -> None:
    submit_rayjob(RayjobApi(cluster), job.rayjob)
