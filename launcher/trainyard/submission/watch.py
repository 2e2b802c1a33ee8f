"""RayJob status -> Phase, and the sights of a submission until its end."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trainyard.cluster.follow import State, Watched, follow, follow_log
from trainyard.errors import ClusterError, RunFailed
from trainyard.labels import RUN_LABEL
from trainyard_trainer.run_files.driver_output import (
    ERROR,
    PROGRESS,
    SUMMARY,
    last_record,
    record_of,
)

Object = dict[str, Any]

Phase = Literal[
    "accepted",
    "starting",
    "submitting",
    "running",
    "retrying",
    "suspended",
    "succeeded",
    "stopped",
    "failed",
]
ENDED: tuple[Phase, ...] = ("succeeded", "stopped", "failed")
LOG_WINDOW_S = 60
"""How far back the log of a running driver is read at first: its progress comes each second."""
LAST_LINES = 400
"""Of a driver's log, for one look at it."""
HEAD_WAIT_S = 2.0
"""Between two looks for the head of a driver that should be running."""

HEAD_CONTAINER = "ray-head"


class Logs(Watched, Protocol):
    """What is needed of a cluster."""

    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        limit: int | None = None,
        cached: bool = False,
    ) -> list[Object]: ...
    def log(self, pod: str, container: str, *, tail_lines: int | None = None) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What is to be seen of a submission at one moment."""

    submission: str
    phase: Phase
    ran: bool = False
    """Whether a driver was started, so that the run's folder may say more."""
    attempts: int = 1
    message: str = ""
    progress: Object | None = None
    summary: Object | None = None


def phase_of(status: Object) -> Phase:
    """How a RayJob stands. Only `jobDeploymentStatus` tells an end: KubeRay stores `Failed` when
    no retry is left, while `jobStatus` may read FAILED between two attempts."""
    deployment = status.get("jobDeploymentStatus", "")
    job = status.get("jobStatus", "")
    if deployment == "Complete":
        return "succeeded" if job == "SUCCEEDED" else "stopped"
    if deployment in ("Failed", "ValidationFailed"):
        return "failed"
    if deployment == "Running":
        return "running" if job else "submitting"
    if deployment in ("Suspending", "Suspended"):
        return "suspended"
    if deployment == "Retrying" or (not deployment and status.get("failed", 0)):
        return "retrying"
    return "starting" if deployment in ("Initializing", "Waiting") else "accepted"


def error_lines(log: str) -> list[str]:
    """The driver's last `error: ...` in a log, line by line and stripped; else the log's last line.

    Its details are indented: what Ray says after them is left out.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    if not starts:
        return [line.strip() for line in lines[-1:]]
    first, *rest = lines[starts[-1] :]
    details = itertools.takewhile(lambda line: line.startswith(" "), rest)
    return [first.strip(), *(line.strip() for line in details)]


def message_of(status: Object) -> str:
    """Why a submission failed: KubeRay's reason and message, of whose quoted log the error alone.

    A message without a reason only repeats the phase.
    """
    if not status.get("reason"):
        return ""
    return f"{status['reason']}: {' '.join(error_lines(status.get('message', '')))}"


def attempts_of(status: Object) -> int:
    """Attempts that were begun: the failed ones, and the one that is under way or ended well."""
    failed = int(status.get("failed", 0))
    return failed + (0 if phase_of(status) in ("failed", "accepted") and failed else 1)


def head_pod(cluster: Logs, ray_cluster: str) -> str | None:
    """Name of the running head pod of a RayCluster, or None."""
    labels = {"ray.io/cluster": ray_cluster, "ray.io/node-type": "head"}
    running = [
        pod
        for pod in cluster.list("Pod", labels, fields="status.phase=Running", cached=True)
        if "deletionTimestamp" not in pod["metadata"]
    ]
    return str(running[-1]["metadata"]["name"]) if running else None


def pending_reason(pods: list[Object]) -> str:
    """Why a cluster does not start: what the scheduler or the kubelet says of the first such pod."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{name} is not scheduled: {condition.get('message', '')}"
        for container in [
            *status.get("initContainerStatuses", []),
            *status.get("containerStatuses", []),
        ]:
            waiting = container["state"].get("waiting", {})
            if waiting.get("message"):
                return f"{name} waits: {waiting['reason']}: {waiting['message']}"
    return ""


def sight_of(job: Object) -> Sight:
    """A submission as its RayJob alone tells it."""
    status = job.get("status", {})
    return Sight(
        submission=job["metadata"]["name"],
        phase=phase_of(status),
        ran=bool(status.get("jobStatus")),
        attempts=attempts_of(status),
        message=message_of(status),
    )


def with_reason(sight: Sight, job: Object, pending: list[Object]) -> Sight:
    """A start that waits, with what keeps the first of its pods from starting."""
    if sight.phase != "starting" or sight.message:
        return sight
    its_cluster = job.get("status", {}).get("rayClusterName")
    own = [pod for pod in pending if pod["metadata"]["labels"].get("ray.io/cluster") == its_cluster]
    return replace(sight, message=pending_reason(own))


def look(cluster: Logs, job: Object) -> Sight:
    """A submission as it stands now, with its driver's latest words where a head is there."""
    sight, ray_cluster = sight_of(job), job.get("status", {}).get("rayClusterName", "")
    if ray_cluster and sight.phase == "starting":
        labels = {"ray.io/cluster": ray_cluster}
        pending = cluster.list("Pod", labels, fields="status.phase=Pending", limit=50, cached=True)
        return with_reason(sight, job, pending)
    if ray_cluster and sight.phase in ("running", *ENDED):
        pod = head_pod(cluster, ray_cluster)
        log = "" if pod is None else _last_words(cluster, pod)
        progress, summary = last_record(log, PROGRESS), last_record(log, SUMMARY)
        return replace(sight, progress=progress, summary=summary)
    return sight


def _last_words(cluster: Logs, pod: str) -> str:
    """The end of a head's log; empty where its container is not there, before its start or after its end."""
    try:
        return cluster.log(pod, HEAD_CONTAINER, tail_lines=LAST_LINES)
    except ClusterError as error:
        if error.reason in ("BadRequest", "NotFound"):
            return ""
        raise


class Watch:
    """What was heard of a submission so far -> how it stands. It knows no cluster and no time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.job: Object | None = None
        self._sight: Sight | None = None
        self._pending: list[Object] = []

    @property
    def ray_cluster(self) -> str:
        """The RayCluster whose driver is running; empty between two attempts."""
        status = {} if self.job is None else self.job.get("status", {})
        return str(status.get("rayClusterName", "")) if phase_of(status) == "running" else ""

    def hear_job(self, jobs: State) -> Sight:
        """The RayJob has changed. Raises RunFailed where it is gone."""
        self.job = jobs.get(self.name)
        if self.job is None:
            raise RunFailed(
                f"RayJob {self.name} was deleted while it was watched",
                "Submit the run again: it goes on from its last checkpoint.",
            )
        before, self._sight = self._sight, sight_of(self.job)
        if before is not None and before.phase == self._sight.phase == "running":
            self._sight = replace(self._sight, progress=before.progress, summary=before.summary)
        return self._look()

    def hear_pods(self, pending: State) -> Sight | None:
        """Pods of the run that have not started have changed."""
        self._pending = list(pending.values())
        return None if self._sight is None else self._look()

    def hear_line(self, line: str) -> Sight | None:
        """The driver has said something; most of it is no news."""
        progress, summary = record_of(line, PROGRESS), record_of(line, SUMMARY)
        if self._sight is None or (progress is None and summary is None):
            return None
        self._sight = replace(
            self._sight,
            progress=progress or self._sight.progress,
            summary=summary or self._sight.summary,
        )
        return self._look()

    def _look(self) -> Sight:
        assert self._sight is not None
        assert self.job is not None
        return with_reason(self._sight, self.job, self._pending)


def watch_run(
    cluster: Logs,
    name: str,
    run: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Sight]:
    """Sights of a submission until it has ended; the last one is its end.

    One watch on its RayJob, one on the run's pods that have not started, and the driver's log as it
    comes. Raises RunFailed if the RayJob vanishes, ClusterUnreachable if the cluster is away too long.
    """
    watch, heard = Watch(name), _Heard()
    heard.begin(
        "job", follow(cluster, "RayJob", fields=f"metadata.name={name}", clock=clock, sleep=sleep)
    )
    pods = follow(
        cluster, "Pod", {RUN_LABEL: run}, fields="status.phase=Pending", clock=clock, sleep=sleep
    )
    heard.begin("pods", pods)
    hearing = ""
    for source, item in heard:
        if source == "job":
            sight: Sight | None = watch.hear_job(item)
        else:
            sight = watch.hear_pods(item) if source == "pods" else watch.hear_line(item)
        if sight is None:
            continue
        if sight.phase in ENDED:
            assert watch.job is not None
            last = look(cluster, watch.job)
            yield replace(
                last,
                progress=last.progress or sight.progress,
                summary=last.summary or sight.summary,
            )
            return
        yield sight
        if watch.ray_cluster not in ("", hearing):
            hearing = watch.ray_cluster
            lines = driver_lines(cluster, watch, hearing, clock, sleep)
            heard.begin("line", lines)


def driver_lines(
    cluster: Logs,
    watch: Watch,
    ray_cluster: str,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[str]:
    """What the driver says, while its RayCluster is the current one; a head that is lost has a successor."""
    while watch.ray_cluster == ray_cluster:
        pod = head_pod(cluster, ray_cluster)
        if pod is not None:
            yield from follow_log(
                cluster, pod, HEAD_CONTAINER, since_s=LOG_WINDOW_S, clock=clock, sleep=sleep
            )
        sleep(HEAD_WAIT_S)


class _Heard:
    """What several sources say, in the order in which it comes. Each source has a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def begin(self, source: str, items: Iterator[Any]) -> None:
        """Listen to one more source; the program need not wait for its end."""

        def listen() -> None:
            try:
                for item in items:
                    self._queue.put((source, item))
            except Exception as error:  # noqa: BLE001 - raised again by whoever listens
                self._queue.put(("error", error))

        threading.Thread(target=listen, name=f"watch-{source}", daemon=True).start()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        while True:
            source, item = self._queue.get()
            if source == "error":
                raise item
            yield source, item
