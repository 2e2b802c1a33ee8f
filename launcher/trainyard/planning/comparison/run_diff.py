"""Compare two RayJobs of a run: the submitted one and the one that the run file gives now.

Both are parsed objects; nothing here calls the cluster. Each change says when it would take effect.
KubeRay reads some fields continuously, some when an attempt starts and some only once, and the
trainer refuses a config that would train another model. trainyard edits no RayJob: `trainyard
submit` creates a new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.errors import ConfigError
from trainyard.labels import (
    APPLICATION_LABEL,
    DOMAIN,
    GANG_LABEL,
    PRIORITY_LABELS,
    QUEUE_LABELS,
    RUN_LABEL,
)
from trainyard.quantities import SUFFIXES, quantity
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, CONFIG_VARIABLE
from trainyard_trainer.config.training.identity import LENGTHS, MAY_CHANGE
from trainyard_trainer.config.training.train import has_fixed_workers
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.standing_cluster import (
    driver_variables,
    standing_cluster_of,
)

Object = dict[str, Any]
Effect = Literal["no effect", "at once", "next attempt", "new submission", "refused"]

CONFIG = "config"
"""The path under which the trainer's config is compared. It is an environment variable of the
driver."""

NUM_WORKERS = f"{CONFIG}.scaling.num_workers"
FIXED_WORKERS = "its strategy can only load checkpoints with the number of workers that wrote them"

AT_ONCE = {"suspend", "activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit"}
"""Fields of `spec` that KubeRay reads continuously."""
AT_THE_END = {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "deletionStrategy"}
"""Fields of `spec` that KubeRay reads when the job ends."""
WRITTEN_ONCE = {"submissionMode", "jobId", "managedBy", "clusterSelector"}
"""Fields of `spec` that KubeRay reads only when the RayJob is created."""

WRITTEN_BY_KUEUE = {
    f"kueue.x-k8s.io/{key}"
    for key in (
        "cluster-queue-name",
        "local-queue-name",
        "podset",
        "workload",
        "workload-slice-name",
    )
}
"""Labels and annotations that Kueue adds to the pods of a RayJob when it admits the job."""

OF_A_FLAVOR = re.compile(r"\.(nodeSelector|tolerations)(\.|\[|$)")
"""Paths below which Kueue adds the node labels and tolerations of the flavor that it has chosen."""
BY_KUEUE = "Kueue adds it when it admits the job, for the nodes of the flavor that it chooses"

OF_THE_DRIVER = {
    CONFIG_VARIABLE,  # compared by itself
    CODE_VARIABLE,  # the config contains its SHA-256
    submission.VARIABLE,  # describes the other fields
    submission.SOURCE_VARIABLE,  # does not decide what is trained
}
"""Variables that are not compared as such."""

DEFAULTS: Object = {
    "backoffLimit": 0,
    "ttlSeconds": 0,
    "ttlSecondsAfterFinished": 0,
    "protocol": "TCP",
    "numOfHosts": 1,
    "replicas": 0,
    "minReplicas": 0,
    "maxReplicas": 2**31 - 1,
    "submissionMode": "K8sJobMode",
    "shutdownAfterJobFinishes": False,
}
"""Values that the API server adds to a RayJob, or that the operator omits when it writes one. They
are no changes."""

RESOURCE_MAPS = ("limits", "requests")
"""Maps of quantities, which the operator normalises: 2048Mi becomes 2Gi, and 0.1 becomes 100m."""

QUEUE_SYSTEM_LABELS = {
    GANG_LABEL,
    APPLICATION_LABEL,
    *QUEUE_LABELS.values(),
    *PRIORITY_LABELS.values(),
}
"""Labels of a RayJob that `trainyard.run_file.queue` sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldChange:
    """A field of a RayJob that differs between the submitted object and the new one."""

    path: str
    before: Any
    """The value in the submitted RayJob; None if the field is absent."""
    after: Any
    """The value in the new RayJob; None if the field is absent."""
    effect: Effect
    """When the change takes effect."""
    why: str
    """The reason for the effect, as a clause without a full stop."""


def diff_jobs(before: Object, after: Object, *, live: bool) -> tuple[FieldChange, ...]:
    """List the differences between a RayJob from the cluster and a newly rendered one.

    `live` says whether the submission of the former has not ended yet.
    """
    spec = by_name(before.get("spec", {}))
    is_admitted = _without_keys(spec, WRITTEN_BY_KUEUE) != spec
    before, after = _comparable(before, after), _comparable(after, after)
    is_fixed = _has_fixed_workers(before) and _has_fixed_workers(after)

    def change_of(path: str, old: Any, new: Any) -> FieldChange:
        if path == NUM_WORKERS and is_fixed:
            return FieldChange(
                path=path, before=old, after=new, effect="refused", why=FIXED_WORKERS
            )
        if is_admitted and new is None and OF_A_FLAVOR.search(path):
            return FieldChange(path=path, before=old, after=new, effect="no effect", why=BY_KUEUE)
        return _classify(path, old, new, live)

    return tuple(change_of(*found) for found in differences(before, after))


def _has_fixed_workers(job: Object) -> bool:
    config = job.get(CONFIG)
    return isinstance(config, dict) and has_fixed_workers(config.get("train"))


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old value and new value of each leaf that differs; an absent value is None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            below = f"{path}[{key}]" if "/" in key else f"{path}.{key}".lstrip(".")
            yield from differences(before.get(key), after.get(key), below)
    elif before != after:
        yield path, before, after


def require_same_identity(submissions: Sequence[Object], after: Object) -> None:
    """Require that a new RayJob trains the same model as an earlier submission of its run.

    The driver checks this against the run's folder. This check finds the problem before a GPU is
    used, if a RayJob remains whose driver has started. Agreement with one of them is enough,
    because the driver may have refused the others. Raises ConfigError with all fields that differ.
    """
    started = [job for job in submissions if _driver_has_started(job)]
    refusals = [_refused_changes(before, after) for before in started]
    if not refusals or not all(refusals):
        return
    run = after["metadata"]["labels"][RUN_LABEL]
    raise ConfigError(
        f"run {run} exists as {started[-1]['metadata']['name']}, and this run file would train another model",
        *(f"{one.path}: {one.before} -> {one.after}: {one.why}" for one in refusals[-1]),
        "Give the run another name (--name), or rename the folder of the existing run and start from the "
        "beginning (--fresh).",
    )


def _refused_changes(before: Object, after: Object) -> list[FieldChange]:
    return [one for one in diff_jobs(before, after, live=False) if one.effect == "refused"]


def _driver_has_started(job: Object) -> bool:
    """Return whether the driver of a RayJob may have written to the run's folder."""
    status = job.get("status", {})
    return bool(status.get("jobStatus") or status.get("failed") or status.get("succeeded"))


def _comparable(job: Object, rendered: Object) -> Object:
    """Reduce a RayJob to what trainyard sets: no status, nothing that the API server or a
    controller adds.

    `rendered` is the new RayJob, whose labels and annotations tell which of them trainyard sets.
    """
    metadata = {
        field: _set_by_trainyard(
            job["metadata"].get(field),
            {*(rendered["metadata"].get(field) or {}), *_of_run_file(job, field)},
        )
        for field in ("labels", "annotations")
    }
    named: Object = by_name(job.get("spec", {}))
    if standing_cluster_of(job) is not None and (variables := driver_variables(job)):
        named["runtimeEnvYAML"] = variables
    named = _without_keys(named, OF_THE_DRIVER)
    # Kueue changes these fields when it admits the job.
    if QUEUE_LABELS["kueue"] in metadata["labels"]:
        named.pop("suspend", None)
        named = _without_keys(named, WRITTEN_BY_KUEUE)
    return {"metadata": metadata, "spec": named, CONFIG: _config_of(job)}


def _without_keys(node: Any, keys: set[str]) -> Any:
    """Remove keys at any depth, and mappings that are empty without them."""
    if not isinstance(node, dict):
        return node
    kept = {key: _without_keys(value, keys) for key, value in node.items() if key not in keys}
    return {key: value for key, value in kept.items() if value != {} or node[key] == {}}


def _of_run_file(job: Object, field: str) -> set[str]:
    """Return the keys of the labels or annotations that the run file of a RayJob has set.

    A RayJob that an older launcher has rendered does not tell them.
    """
    launch = json.loads(driver_variables(job).get(submission.VARIABLE, "{}")).get("launch", {})
    return set(launch.get(field) or {})


def _set_by_trainyard(found: dict[str, str] | None, known: set[str]) -> dict[str, str]:
    """Select the labels or annotations that trainyard renders now, or may have rendered earlier.

    Controllers and users add others to a RayJob. So a key that is not known from one of the run files
    is recognised only if it has trainyard's prefix or belongs to a queue system.
    """
    return {
        key: value
        for key, value in (found or {}).items()
        if key in known or key.startswith(DOMAIN) or key in QUEUE_SYSTEM_LABELS
    }


def by_name(node: Any) -> Any:
    """Turn lists of named objects into mappings by name, and omit values that are defaults."""
    if isinstance(node, dict):
        kept = {
            key: normalised_quantities(value) if key in RESOURCE_MAPS else by_name(value)
            for key, value in node.items()
            if key not in DEFAULTS or DEFAULTS[key] != value
        }
        return {key: value for key, value in kept.items() if value not in (None, {})}
    if not isinstance(node, list):
        return node
    for name in ("name", "groupName"):
        names = [item.get(name) if isinstance(item, dict) else None for item in node]
        if all(isinstance(one, str) for one in names) and len(set(names)) == len(names):
            return {one: by_name(item) for one, item in zip(names, node, strict=True)}
    return {str(index): by_name(item) for index, item in enumerate(node)}


def normalised_quantities(node: Any) -> Any:
    """Write equal quantities of a map by resource name in the same way; leave other values
    unchanged."""
    if not isinstance(node, dict):
        return by_name(node)
    return {name: _normalised(amount) for name, amount in node.items()}


def _normalised(amount: Any) -> Any:
    """Write a quantity in the largest unit that keeps it a whole number; return other values
    unchanged."""
    try:
        exact = quantity(amount)
    except ValueError:
        return amount
    units = ("Ti", "Gi", "Mi", "Ki") if str(amount).endswith("i") else ("", "m")
    for unit in units:
        if (count := exact / SUFFIXES[unit]).denominator == 1:
            return f"{count}{unit}"
    return amount


def _config_of(job: Object) -> Any:
    """Return the trainer's config in a RayJob: parsed, or as text if it is invalid JSON."""
    text = driver_variables(job).get(CONFIG_VARIABLE)
    try:
        return text and json.loads(text)
    except json.JSONDecodeError:
        return text


def _classify(path: str, before: Any, after: Any, live: bool) -> FieldChange:
    effect, why = _effect(path, before, after)
    if not live and effect in ("at once", "new submission"):
        effect, why = (
            "next attempt",
            "the submission has ended, and the next one includes the change",
        )
    return FieldChange(path=path, before=before, after=after, effect=effect, why=why)


def _effect(path: str, before: Any, after: Any) -> tuple[Effect, str]:
    root, *keys = path.split(".")
    if root == CONFIG:
        return _config_effect(keys, before, after)
    if root == "metadata":
        if path.removesuffix("]").partition("[")[2] in QUEUE_LABELS.values():
            return "new submission", "a queue reads it when the job is created"
        return "next attempt", "KubeRay copies it to the RayCluster of each attempt"
    field = keys[0] if keys else ""
    if field in AT_ONCE:
        return "at once", "KubeRay reads it continuously"
    if field in AT_THE_END:
        return "at once", "KubeRay reads it when the job ends"
    if field in WRITTEN_ONCE:
        return "new submission", "KubeRay reads it when the job is created"
    return "next attempt", "KubeRay creates a new RayCluster for each attempt"


def _config_effect(keys: list[str], before: Any, after: Any) -> tuple[Effect, str]:
    section, *rest = keys or [""]
    key = rest[0] if rest else ""
    if section == "train" and key in LENGTHS:
        if isinstance(before, int) and isinstance(after, int) and after < before:
            return "refused", "it can only be increased"
        return "next attempt", "the run continues for longer"
    if section in MAY_CHANGE and key not in MAY_CHANGE[section]:
        return "refused", "it changes what is trained, so it is part of the run's identity"
    if section == "storage":
        return "next attempt", "the run's folder moves, so the run starts from the beginning there"
    return "next attempt", "the driver reads its config when an attempt starts"
