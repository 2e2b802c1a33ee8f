"""Messages of the KubeRay operator and the API server about an existing object, with cause and remedy.

They depend on the status of the object, on the feature gates of the operator, or on the state before a
change. `check` finds all other problems before the object is created.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMessage:
    """A message of KubeRay, its cause and its remedy."""

    said: str
    """Regular expression for the message of an event, a condition or an API error."""
    cause: str
    remedy: str


OPERATOR_MESSAGES = (
    OperatorMessage(
        said=r"JobDeploymentStatus cannot be `Waiting` when SubmissionMode is not InteractiveMode",
        cause="the submissionMode of the RayJob was changed while it was waiting for its user",
        remedy="Delete the RayJob and submit the run again. Do not change a RayJob.",
    ),
    OperatorMessage(
        said=r"RayJobDeletionPolicy feature gate must be enabled",
        cause="the operator's feature gate RayJobDeletionPolicy is disabled; it is enabled by default",
        remedy="Start the operator with -feature-gates RayJobDeletionPolicy=true.",
    ),
    OperatorMessage(
        said=r"(?P<gate>RayCluster(?:NetworkPolicy|MTLS|HistoryServer)|GCSFaultToleranceEmbeddedStorage)"
        r" feature gate (?:to be|is not) enabled",
        cause="the RayCluster uses a field of the feature gate {gate}, which the operator has disabled",
        remedy="Start the operator with -feature-gates {gate}=true, or remove the field.",
    ),
    OperatorMessage(
        said=r"the managedBy field is immutable",
        cause="managedBy of an existing RayJob was changed",
        remedy="Delete the RayJob and create it again: managedBy cannot be changed.",
    ),
    OperatorMessage(
        said=r"gcsFaultToleranceOptions\.backend is immutable",
        cause="the backend of GCS fault tolerance was changed on an existing RayCluster",
        remedy="Create a new RayCluster: the state of the old backend cannot be moved.",
    ),
    OperatorMessage(
        said=r"upgradeStrategy cannot be set when RayCluster is created by (?P<owner>\w+)",
        cause="rayClusterSpec.upgradeStrategy is set in a {owner}, which therefore stays Initializing",
        remedy="Remove upgradeStrategy, delete the {owner} and submit it again.",
    ),
    OperatorMessage(
        said=r"RayClusterSuspending and rayv1\.RayClusterSuspended conditions should not be both true",
        cause="the status of the RayCluster is both suspending and suspended",
        remedy="Delete the RayCluster; its RayJob creates another one.",
    ),
    OperatorMessage(
        said=r"The Ray[A-Z]\w+ (?:spec|metadata|status) is invalid: (?P<what>.*)",
        cause="the operator refuses the object: {what}",
        remedy="Correct it, delete the object and submit it again: KubeRay does not leave the status "
        "ValidationFailed. `trainyard check` finds such errors in a file.",
    ),
)
"""The known messages. The first that matches is used."""


def explain(message: str) -> OperatorMessage | None:
    """Return the cause and the remedy of a message, with its own values filled in; None if it is not
    known."""
    for one in OPERATOR_MESSAGES:
        if found := re.search(one.said, message):
            words = found.groupdict(default="")
            return OperatorMessage(
                said=message,
                cause=one.cause.format(**words),
                remedy=one.remedy.format(**words),
            )
    return None
