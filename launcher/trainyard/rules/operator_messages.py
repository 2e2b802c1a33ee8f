"""What KubeRay and its API server say of an object that exists already, in other words.

`check` finds the rest before there is an object; these need its status, the operator's feature gates,
or its state before a change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMessage:
    """A text of KubeRay's, what it means, and what helps."""

    said: str
    """A regular expression for an event's or condition's message, or an API error."""
    cause: str
    remedy: str


OPERATOR_MESSAGES = (
    OperatorMessage(
        said=r"JobDeploymentStatus cannot be `Waiting` when SubmissionMode is not InteractiveMode",
        cause="the RayJob's submissionMode was changed while it waited for its user",
        remedy="Delete the RayJob and submit the run again: a RayJob is never changed.",
    ),
    OperatorMessage(
        said=r"RayJobDeletionPolicy feature gate must be enabled",
        cause="the operator runs with its gate RayJobDeletionPolicy off, which is on by default",
        remedy="Start the operator with -feature-gates RayJobDeletionPolicy=true.",
    ),
    OperatorMessage(
        said=r"(?P<gate>RayCluster(?:NetworkPolicy|MTLS|HistoryServer)|GCSFaultToleranceEmbeddedStorage)"
        r" feature gate (?:to be|is not) enabled",
        cause="the RayCluster uses a field whose gate ({gate}) is off in the operator",
        remedy="Start the operator with -feature-gates {gate}=true, or leave the field out.",
    ),
    OperatorMessage(
        said=r"the managedBy field is immutable",
        cause="someone tried to hand the RayJob from one controller to another",
        remedy="Delete it and create it anew: managedBy is set once.",
    ),
    OperatorMessage(
        said=r"gcsFaultToleranceOptions\.backend is immutable",
        cause="the backend of GCS fault tolerance was changed on a cluster that exists",
        remedy="Make a new RayCluster: the state of the old backend cannot be moved.",
    ),
    OperatorMessage(
        said=r"upgradeStrategy cannot be set when RayCluster is created by (?P<owner>\w+)",
        cause="rayClusterSpec.upgradeStrategy is set in a {owner}; it stays Initializing for ever",
        remedy="Delete the {owner}, remove upgradeStrategy, and submit again.",
    ),
    OperatorMessage(
        said=r"RayClusterSuspending and rayv1\.RayClusterSuspended conditions should not be both true",
        cause="the RayCluster's status says suspending and suspended at once",
        remedy="Delete the RayCluster; its RayJob makes another.",
    ),
    OperatorMessage(
        said=r"The Ray[A-Z]\w+ (?:spec|metadata|status) is invalid: (?P<what>.*)",
        cause="the operator refuses the object: {what}",
        remedy="ValidationFailed has no way out: delete it, mend that, and submit again. "
        "`trainyard check` finds such things in a file.",
    ),
)
"""The first that matches is taken."""


def explain(message: str) -> OperatorMessage | None:
    """What a message means, with its own words filled in; None where it is not known."""
    for one in OPERATOR_MESSAGES:
        if found := re.search(one.said, message):
            words = found.groupdict(default="")
            return OperatorMessage(
                said=message,
                cause=one.cause.format(**words),
                remedy=one.remedy.format(**words),
            )
    return None
