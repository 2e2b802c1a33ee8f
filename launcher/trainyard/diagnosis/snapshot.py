"""A snapshot of a run: its Kubernetes objects and log texts at one moment, and simple queries on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

from trainyard.submission.status import ENDED, Phase, condition, phase_of

Object = dict[str, Any]

INIT_CONTAINER = "wait-gcs-ready"
"""The init container that the operator adds to worker pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run's last submission with all related objects. None means that a value is not known."""

    run: str
    namespace: str
    now: datetime
    context: str | None = None
    """The kubeconfig context that was chosen; None for the current one."""
    job: Object | None = None
    """The RayJob; None where there is none (any more)."""
    ray_clusters: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()
    """Of the RayJob, its clusters, its pods and its claims; oldest first."""
    claims: Mapping[str, Object | None] = field(default_factory=dict)
    """The claims that its pods mount, by name; None for one that is missing."""
    quotas: tuple[Object, ...] = ()
    """The ResourceQuotas of the namespace."""
    nodes: tuple[Object, ...] | None = None
    """The nodes, asked for where a pod finds no place."""
    workload: Object | None = None
    """What Kueue made of the RayJob."""
    local_queue: Object | None = None
    """The Kueue queue that the RayJob names, where it exists."""
    queue_position: int | None = None
    """How many workloads wait before it in the queue."""
    preemptor: str = ""
    """The run of the namespace for which Kueue has preempted it; empty if there is none, or it is gone."""
    operators: tuple[Object, ...] | None = None
    """Pods of the KubeRay operator, in all namespaces."""
    leases: tuple[Object, ...] | None = None
    """Leases of the KubeRay operator's leader, in all namespaces."""
    has_token_secret: bool | None = None
    """Whether the Secret with Ray's token is there; asked for where a deletion hangs."""
    init_log: str = ""
    """What the init container of a worker that still waits for the head has said."""
    log: str = ""
    """The driver's log: the end of what the head said, or what the run's folder has kept."""
    summary: Object | None = None
    """summary.json of the run's folder, read where the cluster is gone."""
    missing_kinds: tuple[str, ...] = ()
    """Kinds that the API server does not know."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why."""

    @property
    def status(self) -> Object:
        return {} if self.job is None else self.job.get("status") or {}

    @property
    def spec(self) -> Object:
        return {} if self.job is None else self.job.get("spec") or {}

    @property
    def submission(self) -> str:
        return "" if self.job is None else str(self.job["metadata"]["name"])

    @property
    def phase(self) -> Phase | None:
        """Phase of the submission, or None if the RayJob does not exist."""
        return None if self.job is None else phase_of(self.status)

    @property
    def is_over(self) -> bool:
        return self.phase is None or self.phase in ENDED

    @property
    def is_broken(self) -> bool:
        """Whether an attempt has failed, or a run without a RayJob has not succeeded: its log tells why."""
        if self.phase is None:
            return (self.summary or {}).get("outcome") in ("failed", "stopped")
        return self.phase in ("failed", "retrying")

    @property
    def never_ran(self) -> bool:
        """Whether this attempt has not come as far as its driver."""
        return not self.status.get("jobStatus")

    @property
    def ray_version(self) -> str:
        return str(self.spec.get("rayClusterSpec", {}).get("rayVersion", ""))

    @property
    def pods_wanted(self) -> int:
        """Head and workers of the RayJob."""
        groups = self.spec.get("rayClusterSpec", {}).get("workerGroupSpecs") or []
        return 1 + sum(
            int(group.get("replicas") or 0) * int(group.get("numOfHosts") or 1) for group in groups
        )

    @property
    def driver_log(self) -> str:
        """What the driver said: what the head or the folder has of it, and the end that KubeRay quotes.

        An entrypoint of one's own says nothing on the head's output.
        """
        quoted = str(self.status.get("message") or "")
        return "\n".join(text for text in (self.log, quoted) if text)

    def seconds_since(self, time: str | None) -> float:
        return 0.0 if not time else max((self.now - parse_time(time)).total_seconds(), 0.0)

    def to_plain(self) -> Object:
        """For a file. `from_plain` reads it."""
        nothing = {field.name: field.default for field in fields(self)} | {"claims": {}}
        plain = {name: value for name, value in asdict(self).items() if value != nothing[name]}
        plain["now"] = self.now.isoformat()
        return dict(_lists(plain))

    @classmethod
    def from_plain(cls, plain: Object) -> Snapshot:
        values: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in plain.items()
        }
        return cls(**values | {"now": parse_time(plain["now"])})


def _lists(value: Any) -> Any:
    """The same with lists in place of tuples, which YAML does not have."""
    if isinstance(value, Mapping):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, tuple | list) else value


def parse_time(text: str) -> datetime:
    """A time as Kubernetes writes it, in UTC."""
    time = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


# Pods.


def name_of(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def claims_of(pod_spec: Object) -> list[str]:
    """Names of the claims that a pod mounts."""
    return [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod_spec.get("volumes") or []
        if "persistentVolumeClaim" in volume
    ]


def is_head(pod: Object) -> bool:
    return bool(pod["metadata"].get("labels", {}).get("ray.io/node-type") == "head")


def is_ready(pod: Object) -> bool:
    is_leaving = "deletionTimestamp" in pod["metadata"]
    return condition(pod, "Ready").get("status") == "True" and not is_leaving


def containers(pod: Object) -> Iterator[Object]:
    """The status of each container, init containers first."""
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def terminations(pod: Object) -> Iterator[tuple[str, Object]]:
    """Containers that have ended, now or before their last restart: name, and how they ended."""
    for container in containers(pod):
        for state in (container.get("state", {}), container.get("lastState", {})):
            if "terminated" in state:
                yield container["name"], state["terminated"]


def waits_for_head(pod: Object) -> Object:
    """`running` of its init container wait-gcs-ready; empty where that has not begun or has ended."""
    for status in pod.get("status", {}).get("initContainerStatuses") or []:
        if status["name"] == INIT_CONTAINER:
            return dict(status.get("state", {}).get("running") or {})
    return {}


def image_of(pod: Object) -> str:
    return str(pod["spec"]["containers"][0].get("image", ""))


def limits(pod: Object, container: str) -> Object:
    """The resource limits of a container."""
    spec = pod["spec"]
    for found in [*(spec.get("initContainers") or []), *spec["containers"]]:
        if found["name"] == container:
            return dict(found.get("resources", {}).get("limits") or {})
    return {}


def event_time(event: Object) -> str:
    """When it was seen last; KubeRay 1.7 writes another field than 1.6."""
    return str(
        event.get("lastTimestamp")
        or (event.get("series") or {}).get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )
