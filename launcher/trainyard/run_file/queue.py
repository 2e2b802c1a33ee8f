"""How a run waits for its place: the labels that a queue system reads on the RayJob.

KubeRay copies them to the RayCluster, and its scheduler plugin derives the pods' from there.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import StringConstraints

from trainyard.errors import ConfigError
from trainyard_trainer.config.section import Section

System = Literal["none", "kueue", "volcano", "yunikorn", "kai"]
QueueName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=63),
]
"""A label's value."""

QUEUE_LABELS: dict[System, str] = {
    "kueue": "kueue.x-k8s.io/queue-name",
    "volcano": "volcano.sh/queue-name",
    "yunikorn": "yunikorn.apache.org/queue",
    "kai": "kai.scheduler/queue",
}
PRIORITY_LABELS: dict[System, str] = {
    "kueue": "kueue.x-k8s.io/priority-class",
    "volcano": "ray.io/priority-class-name",
}
GANG_LABEL = "ray.io/gang-scheduling-enabled"
APPLICATION_LABEL = "yunikorn.apache.org/app-id"


class Queue(Section):
    """Where a run waits for its place, on a platform with a queue system."""

    name: QueueName | None = None
    """The queue; without it the platform's."""

    priority: QueueName | None = None
    """Its priority class: Kueue's WorkloadPriorityClass, or Volcano's PriorityClass."""


def queue_labels(
    asked: Queue | None, system: System, default: str, run: str, namespace: str
) -> dict[str, str]:
    """Labels of the RayJob. Raises ConfigError for what the platform's queue system does not have."""
    if system == "none":
        if asked is not None:
            raise ConfigError(
                f"queue = {asked.model_dump(exclude_none=True)}, but the platform has no queue system",
                "Leave `queue` out, or name the system in the chart's values: `queue.system`.",
            )
        return {}
    name = (asked.name if asked else None) or default
    if not name:
        raise ConfigError(
            f"the platform's queue system is {system}, and neither it nor the run names a queue",
            "Name one: `queue: {name: ...}` in the run file, or `queue.name` in the chart's values.",
        )
    labels = {QUEUE_LABELS[system]: name}
    if asked is not None and asked.priority is not None:
        if system not in PRIORITY_LABELS:
            raise ConfigError(
                f"queue.priority = {asked.priority!r}, but {system} reads no priority from a RayJob",
                f"Leave it out; these do: {', '.join(sorted(PRIORITY_LABELS))}.",
            )
        labels[PRIORITY_LABELS[system]] = asked.priority
    if system == "yunikorn":
        # One application per run; two namespaces may have runs of one name.
        place = hashlib.sha256(namespace.encode()).hexdigest()[:8]
        labels |= {GANG_LABEL: "true", APPLICATION_LABEL: f"{run}-{place}"}
    return labels
