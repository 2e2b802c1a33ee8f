"""The keys of the labels that trainyard sets: its own, by which it recognises its objects, and those
of a RayJob that the queue systems read."""

from __future__ import annotations

DOMAIN = "trainyard.io/"
"""The prefix of all label and annotation keys that only trainyard sets."""

RUN_LABEL = f"{DOMAIN}run"
"""The label that holds the name of the run."""

PRE_PULL_LABEL = f"{DOMAIN}prepull"
"""The label by which a DaemonSet of the chart selects the pods that pull the image; it holds the pool."""

OWNER_LABELS = {"app.kubernetes.io/managed-by": "trainyard"}
"""Labels of every object that trainyard creates."""

QUEUE_LABELS: dict[str, str] = {
    "kueue": "kueue.x-k8s.io/queue-name",
    "volcano": "volcano.sh/queue-name",
    "yunikorn": "yunikorn.apache.org/queue",
    "kai": "kai.scheduler/queue",
}
"""The label that names the queue of a run, for each queue system."""

PRIORITY_LABELS: dict[str, str] = {
    "kueue": "kueue.x-k8s.io/priority-class",
    "volcano": "ray.io/priority-class-name",
}
"""The label that names the priority class of a run, for the queue systems that have one."""

GANG_LABEL = "ray.io/gang-scheduling-enabled"
APPLICATION_LABEL = "yunikorn.apache.org/app-id"

ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"
"""The annotation of a RayJob by which Kueue lets its size change."""
