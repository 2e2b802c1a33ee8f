"""What the operator refuses of a RayJob, on each reconcile: name, life cycle, submission."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from trainyard.rules.field_path import Violation
from trainyard.rules.subject import Subject

JOB_NAME_LIMIT = 47
CLUSTER_NAME_LIMIT = 53
"""KubeRay adds `-xxxxx` to a RayJob's name for its RayCluster."""

SUFFIX_LENGTH = 5
"""Characters that the API server adds to `generateName`."""

CLUSTER_SELECTOR_KEY = "ray.io/cluster"


def has_a_name_for_its_pods(subject: Subject) -> Iterator[Violation]:
    limit = JOB_NAME_LIMIT if subject.is_job else CLUSTER_NAME_LIMIT
    name, prefix = subject.metadata.at("name"), subject.metadata.at("generateName")
    place, text = (name, name.text) if name.is_set else (prefix, prefix.text + "x" * SUFFIX_LENGTH)
    if len(text) > limit:
        room = limit if name.is_set else limit - SUFFIX_LENGTH
        yield place.breaks(
            "name", f"has {len(place.text)} characters, more than {room}", "Shorten it."
        )
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text):
        yield place.breaks(
            "name",
            "must have lower case letters, digits and dashes, a letter first and no dash at the end",
            "Rename it.",
        )


def can_be_suspended(subject: Subject) -> Iterator[Violation]:
    suspend = subject.job.at("suspend")
    if not suspend.is_true:
        return
    if not subject.job.at("shutdownAfterJobFinishes").is_true:
        yield suspend.breaks(
            "suspend",
            "needs shutdownAfterJobFinishes: true",
            "Set that, and use ttlSecondsAfterFinished in place of deletionRules.",
        )
    if subject.selects_cluster:
        yield suspend.breaks(
            "suspend", "does not go with clusterSelector", "Leave one of the two out."
        )


def has_a_ttl_that_is_used(subject: Subject) -> Iterator[Violation]:
    ttl = subject.job.at("ttlSecondsAfterFinished")
    if ttl.number is None:
        return
    if ttl.number < 0:
        yield ttl.breaks("ttl", "must be at least 0", "Use 0 for at once.")
    if ttl.number > 0 and not subject.job.at("shutdownAfterJobFinishes").is_true:
        yield ttl.breaks(
            "ttl",
            "needs shutdownAfterJobFinishes: true",
            "Set that, or put the time into deletionRules.",
        )


def has_a_cluster(subject: Subject) -> Iterator[Violation]:
    job, selector = subject.job, subject.job.at("clusterSelector")
    if not subject.is_job:
        return
    if not selector.value:
        if not subject.cluster.is_set:
            yield subject.cluster.breaks(
                "cluster", "and no clusterSelector either", "Give one of the two."
            )
        return
    name = selector.at(CLUSTER_SELECTOR_KEY)
    if not name.text:
        yield name.breaks(
            "cluster", "must name the RayCluster", f"Only {CLUSTER_SELECTOR_KEY} is looked at."
        )
    if subject.mode == "SidecarMode":
        yield job.at("submissionMode").breaks(
            "cluster", "does not go with clusterSelector", "Use K8sJobMode or HTTPMode."
        )
    if (job.at("backoffLimit").number or 0) > 0:
        yield job.at("backoffLimit").breaks(
            "cluster",
            "does not go with clusterSelector: a retry is a new cluster",
            "Set it to 0, or give rayClusterSpec.",
        )


def retries_what_can_be_retried(subject: Subject) -> Iterator[Violation]:
    limit = subject.job.at("backoffLimit")
    if limit.number is None:
        return
    if limit.number < 0:
        yield limit.breaks("retries", "must be at least 0", "Use 0 for no retry.")
    if limit.number > 0 and subject.mode == "InteractiveMode":
        yield limit.breaks(
            "retries", "does not go with InteractiveMode", "Set it to 0, or use HTTPMode."
        )


def submits_from_the_sidecar_alone(subject: Subject) -> Iterator[Violation]:
    if subject.mode != "SidecarMode":
        return
    for key in ("submitterPodTemplate", "submitterConfig"):
        if subject.job.at(key).is_set:
            yield subject.job.at(key).breaks(
                "sidecar",
                "does not go with SidecarMode",
                "Leave it out: there is no submitter pod.",
            )
    policy = subject.head.pod.at("restartPolicy")
    if policy.text not in ("", "Never"):
        yield policy.breaks("sidecar", "must be Never or absent in SidecarMode", "Leave it out.")


def keeps_kubernetes_tokens_out(subject: Subject) -> Iterator[Violation]:
    auth = subject.cluster.at("authOptions")
    asked = auth.at("enableK8sTokenAuth")
    if not asked.is_true:
        return
    if subject.is_job:
        yield asked.breaks("kubernetes-token", "is not for RayJobs", "Use mode: token alone.")
        return
    if auth.at("mode").text != "token":
        yield asked.breaks("kubernetes-token", "needs mode: token", "Set it.")
        return
    version = subject.cluster.at("rayVersion")
    if version.version is not None and version.version < (2, 55):
        yield version.breaks(
            "kubernetes-token", "enableK8sTokenAuth needs Ray 2.55", "Use a newer Ray."
        )
    if auth.at("secretName").text:
        yield auth.at("secretName").breaks(
            "kubernetes-token", "does not go with enableK8sTokenAuth", "Leave one of the two out."
        )


def has_a_runtime_env_that_is_yaml(subject: Subject) -> Iterator[Violation]:
    place = subject.job.at("runtimeEnvYAML")
    if not place.text:
        return
    try:
        parsed: Any = yaml.load(place.text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError) as error:
        said = str(error).splitlines()[0]
        yield place.breaks("runtime-env", f"is not valid YAML: {said}", "Mend it.")
        return
    if not isinstance(parsed, dict | None):
        yield place.breaks("runtime-env", "must hold a mapping", "Write keys such as `env_vars:`.")


def has_deadlines_above_nothing(subject: Subject) -> Iterator[Violation]:
    deadline = subject.job.at("activeDeadlineSeconds")
    if deadline.number is not None and deadline.number <= 0:
        yield deadline.breaks("deadline", "must be above 0", "Raise it, or leave it out.")


def has_metadata_that_can_be_submitted(subject: Subject) -> Iterator[Violation]:
    """In 1.6 the submitter's command cannot be built: the RayJob stays Initializing."""
    given = subject.job.at("metadata")
    if subject.kuberay != "1.6" or not given.value:
        return
    if subject.mode not in ("K8sJobMode", "SidecarMode"):
        return
    if subject.selects_cluster:
        yield given.breaks(
            "metadata", "is dropped beside clusterSelector", "Leave it out.", "warning"
        )
        return
    version = subject.cluster.at("rayVersion")
    if version.version is None or version.version < (2, 6):
        yield version.breaks(
            "metadata",
            f"spec.metadata needs rayVersion 2.6.0 or newer in {subject.mode}",
            "Say which Ray the image has.",
        )


RULES = (
    has_a_name_for_its_pods,
    can_be_suspended,
    has_a_ttl_that_is_used,
    has_a_cluster,
    retries_what_can_be_retried,
    submits_from_the_sidecar_alone,
    keeps_kubernetes_tokens_out,
    has_a_runtime_env_that_is_yaml,
    has_deadlines_above_nothing,
    has_metadata_that_can_be_submitted,
)
