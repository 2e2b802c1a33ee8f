"""The `queue` section of a run file, and the labels and annotations of the RayJob that queue systems read.

KubeRay copies these labels to the RayCluster, and its scheduler plugin derives the labels of the
pods from them.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import StringConstraints

from trainyard.errors import ConfigError
from trainyard.labels import (
    APPLICATION_LABEL,
    ELASTIC_ANNOTATION,
    GANG_LABEL,
    PRIORITY_LABELS,
    QUEUE_LABELS,
)
from trainyard_trainer.config.section import Section

System = Literal["none", "kueue", "volcano", "yunikorn", "kai"]
TopologyMode = Literal["preferred", "required", "unconstrained"]
"""How strictly Kueue packs the workers of a run by a label of nodes."""
QueueName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=63),
]
"""The name of a queue or priority class. It must be a valid value of a label."""


class Queue(Section):
    """The queue and the priority of a run, on a platform with a queue system."""

    name: QueueName | None = None
    """The name of the queue. The default is the platform's queue."""

    priority: QueueName | None = None
    """The priority class of the run: a WorkloadPriorityClass of Kueue, or a PriorityClass with
    Volcano."""


def queue_labels(
    asked: Queue | None, system: System, default: str, run: str, namespace: str
) -> dict[str, str]:
    """Return the labels of the RayJob that put it into its queue.

    `default` is the platform's queue, or an empty string. Raises ConfigError if no queue is set, or
    if the run sets something that the platform's queue system does not support.
    """
    if system == "none":
        if asked is not None:
            raise ConfigError(
                f"queue = {asked.model_dump(exclude_none=True)}, but the platform has no queue system",
                "Remove `queue`, or set `queue.system` in the chart's values.",
            )
        return {}
    name = (asked.name if asked else None) or default
    if not name:
        raise ConfigError(
            f"the platform's queue system is {system}, but neither the run file nor the platform sets "
            "a queue",
            "Set `queue: {name: ...}` in the run file, or `queue.name` in the chart's values.",
        )
    labels = {QUEUE_LABELS[system]: name}
    if asked is not None and asked.priority is not None:
        if system not in PRIORITY_LABELS:
            raise ConfigError(
                f"queue.priority = {asked.priority!r}, but {system} reads no priority from a RayJob",
                f"Remove it, or use one of: {', '.join(sorted(PRIORITY_LABELS))}.",
            )
        labels[PRIORITY_LABELS[system]] = asked.priority
    if system == "yunikorn":
        # One application per run. Runs of different namespaces may have the same name.
        namespace_hash = hashlib.sha256(namespace.encode()).hexdigest()[:8]
        labels |= {GANG_LABEL: "true", APPLICATION_LABEL: f"{run}-{namespace_hash}"}
    return labels


def queue_annotations(system: System, *, is_elastic: bool) -> dict[str, str]:
    """Return the annotations of the RayJob that the queue system reads.

    Kueue makes a new Workload for each size of a RayJob with this annotation, and admits it while the run
    goes on with the size before.
    """
    return {ELASTIC_ANNOTATION: "true"} if system == "kueue" and is_elastic else {}
