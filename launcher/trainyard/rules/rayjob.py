"""Rules of the operator for a RayJob, which it checks on each reconcile: name, life cycle, submission."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

import yaml

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject
from trainyard.run_file.yaml_text import KubernetesLoader

JOB_NAME_LIMIT = 47
CLUSTER_NAME_LIMIT = 53
"""The limit for a RayCluster, whose name is that of its RayJob and `-xxxxx`."""

SUFFIX_LENGTH = 5
"""The number of characters that the API server adds to `generateName`."""

RUNTIME_ENV_TYPES: dict[str, tuple[type, ...]] = {
    "working_dir": (str,),
    "py_modules": (list,),
    "excludes": (list,),
    "pip": (str, list, dict),
    "uv": (str, list, dict),
    "conda": (str, dict),
    "config": (dict,),
}
"""Types of the fields of a runtime environment, as Ray 2.60 validates them."""
RUNTIME_ENV_FIELDS = (
    "env_vars", *RUNTIME_ENV_TYPES, "py_executable", "container", "image_uri",
    "worker_process_setup_hook", "java_jars", "_nsight", "_rocprof_sys",
)  # fmt: skip
EXCLUSIVE = (("pip", "conda"), ("uv", "pip"), ("uv", "conda"))
"""Pairs of fields of a runtime environment that Ray does not accept together."""
SHOWN_TYPES: dict[type, str] = {str: "a string", list: "a list", dict: "a mapping"}

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
            "must consist of lower case letters, digits and dashes, begin with a letter and not end "
            "with a dash",
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
            "Set that, and use ttlSecondsAfterFinished instead of deletionRules.",
        )
    if subject.selects_cluster:
        yield suspend.breaks(
            "suspend", "cannot be combined with clusterSelector", "Remove one of the two."
        )


def has_a_ttl_that_is_used(subject: Subject) -> Iterator[Violation]:
    ttl = subject.job.at("ttlSecondsAfterFinished")
    if ttl.number is None:
        return
    if ttl.number < 0:
        yield ttl.breaks("ttl", "must be at least 0", "Use 0 for immediately.")
    if ttl.number > 0 and not subject.job.at("shutdownAfterJobFinishes").is_true:
        yield ttl.breaks(
            "ttl",
            "needs shutdownAfterJobFinishes: true",
            "Set that, or set ttlSeconds in deletionRules.",
        )


def has_a_cluster(subject: Subject) -> Iterator[Violation]:
    job, selector = subject.job, subject.job.at("clusterSelector")
    if not subject.is_job:
        return
    if not selector.value:
        if not subject.cluster.is_set:
            yield subject.cluster.breaks(
                "cluster", "is required without clusterSelector", "Set one of the two."
            )
        return
    name = selector.at(CLUSTER_SELECTOR_KEY)
    if not name.text:
        yield name.breaks(
            "cluster",
            "must name the RayCluster",
            f"Set {CLUSTER_SELECTOR_KEY}: KubeRay reads no other key.",
        )
    if subject.mode == "SidecarMode":
        yield job.at("submissionMode").breaks(
            "cluster", "cannot be combined with clusterSelector", "Use K8sJobMode or HTTPMode."
        )
    if (job.at("backoffLimit").number or 0) > 0:
        yield job.at("backoffLimit").breaks(
            "cluster",
            "cannot be combined with clusterSelector: each retry needs a new cluster",
            "Set it to 0, or use rayClusterSpec.",
        )


def retries_what_can_be_retried(subject: Subject) -> Iterator[Violation]:
    limit = subject.job.at("backoffLimit")
    if limit.number is None:
        return
    if limit.number < 0:
        yield limit.breaks("retries", "must be at least 0", "Use 0 for no retries.")
    if limit.number > 0 and subject.mode == "InteractiveMode":
        yield limit.breaks(
            "retries", "cannot be combined with InteractiveMode", "Set it to 0, or use HTTPMode."
        )


def submits_from_the_sidecar_alone(subject: Subject) -> Iterator[Violation]:
    if subject.mode != "SidecarMode":
        return
    for key in ("submitterPodTemplate", "submitterConfig"):
        if subject.job.at(key).is_set:
            yield subject.job.at(key).breaks(
                "sidecar",
                "cannot be combined with SidecarMode",
                "Remove it: there is no submitter pod.",
            )
    policy = subject.head.pod.at("restartPolicy")
    if policy.text not in ("", "Never"):
        yield policy.breaks("sidecar", "must be Never or unset in SidecarMode", "Remove it.")


def keeps_kubernetes_tokens_out(subject: Subject) -> Iterator[Violation]:
    auth = subject.cluster.at("authOptions")
    asked = auth.at("enableK8sTokenAuth")
    if not asked.is_true:
        return
    if subject.is_job:
        yield asked.breaks(
            "kubernetes-token", "is not supported in a RayJob", "Use mode: token without it."
        )
        return
    if auth.at("mode").text != "token":
        yield asked.breaks("kubernetes-token", "needs mode: token", "Set it.")
        return
    version = subject.cluster.at("rayVersion")
    if version.version is not None and version.version < (2, 55):
        yield version.breaks(
            "kubernetes-token", "enableK8sTokenAuth needs Ray 2.55 or newer", "Use a newer Ray."
        )
    if auth.at("secretName").text:
        yield auth.at("secretName").breaks(
            "kubernetes-token",
            "cannot be combined with enableK8sTokenAuth",
            "Remove one of the two.",
        )


def has_a_runtime_env_that_is_yaml(subject: Subject) -> Iterator[Violation]:
    place = subject.job.at("runtimeEnvYAML")
    if not place.text:
        return
    try:
        parsed: Any = yaml.load(place.text, KubernetesLoader)
    except (yaml.YAMLError, ValueError) as error:
        said = str(error).splitlines()[0]
        yield place.breaks("runtime-env", f"is not valid YAML: {said}", "Correct it.")
        return
    if not isinstance(parsed, dict | None):
        yield place.breaks("runtime-env", "must be a mapping", "Use keys such as `env_vars:`.")
    else:
        yield from _ray_refusals(FieldPath(place.path, parsed))


def _ray_refusals(env: FieldPath) -> Iterator[Violation]:
    """Yield what Ray would refuse in a runtime environment, after the cluster with its GPUs has started."""
    variables = env.at("env_vars")
    if variables.is_set and not isinstance(variables.value, dict):
        yield variables.breaks(
            "runtime-env-values", "must be a mapping from names to strings", "Write NAME: value."
        )
    for name, value in (variables.value if isinstance(variables.value, dict) else {}).items():
        if not isinstance(name, str):
            yield variables.breaks(
                "runtime-env-values",
                f"has the key {name!r}, but Ray accepts only strings",
                "Quote the key.",
            )
        elif not isinstance(value, str):
            yield variables.at(name).breaks(
                "runtime-env-values", "must be a string", "Quote the value."
            )
    for key, kinds in RUNTIME_ENV_TYPES.items():
        field = env.at(key)
        if field.is_set and not isinstance(field.value, kinds):
            names = " or ".join(SHOWN_TYPES[kind] for kind in kinds)
            yield field.breaks("runtime-env-values", f"must be {names}", "Change its type.")
        elif isinstance(field.value, list) and not all(
            isinstance(item, str) for item in field.value
        ):
            yield field.breaks(
                "runtime-env-values", "must contain only strings", "Quote its items."
            )
    for one, other in EXCLUSIVE:
        if env.at(one).value and env.at(other).value:
            yield env.at(one).breaks(
                "runtime-env-values", f"cannot be combined with {other}", "Keep one of the two."
            )
    unknown = sorted(str(key) for key in env.value or {} if key not in RUNTIME_ENV_FIELDS)
    for key in unknown:
        near = difflib.get_close_matches(key, RUNTIME_ENV_FIELDS, n=1)
        yield env.at(key).breaks(
            "runtime-env-values",
            "is not a field of a runtime environment, and Ray ignores it",
            f"Did you mean {near[0]}?" if near else f"Fields: {', '.join(RUNTIME_ENV_FIELDS)}.",
            "warning",
        )


def has_deadlines_above_nothing(subject: Subject) -> Iterator[Violation]:
    deadline = subject.job.at("activeDeadlineSeconds")
    if deadline.number is not None and deadline.number <= 0:
        yield deadline.breaks("deadline", "must be above 0", "Raise it, or remove it.")


def has_metadata_that_can_be_submitted(subject: Subject) -> Iterator[Violation]:
    """Check `spec.metadata`. KubeRay 1.6 cannot build the command of the submitter with it for an old Ray,
    and the RayJob stays Initializing."""
    given = subject.job.at("metadata")
    if subject.kuberay != "1.6" or not given.value:
        return
    if subject.mode not in ("K8sJobMode", "SidecarMode"):
        return
    if subject.selects_cluster:
        yield given.breaks("metadata", "is ignored with clusterSelector", "Remove it.", "warning")
        return
    version = subject.cluster.at("rayVersion")
    if version.version is None or version.version < (2, 6):
        yield version.breaks(
            "metadata",
            f"spec.metadata needs rayVersion 2.6.0 or newer in {subject.mode}",
            "Set the Ray version of the image.",
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
