"""Two RayJobs of a run, the one that was submitted and the one that would be: what differs, and what it
would change. Both are parsed objects; no cluster is asked here.

KubeRay reads some fields at once, some at the next attempt and some never again; the trainer refuses
what would make another model. trainyard itself edits no RayJob: `submit` makes a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.errors import ConfigError
from trainyard.quantities import SUFFIXES, quantity
from trainyard.run_file.queue import APPLICATION_LABEL, GANG_LABEL, PRIORITY_LABELS, QUEUE_LABELS
from trainyard_trainer.config.train import has_fixed_workers
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    LENGTHS,
    MAY_CHANGE,
)
from trainyard_trainer.run_files import submission

Object = dict[str, Any]
Effect = Literal["no effect", "at once", "next attempt", "new submission", "refused"]

CONFIG = "config"
"""The path of the run's config, which travels as one variable of the head."""

NUM_WORKERS = f"{CONFIG}.scaling.num_workers"
FIXED_WORKERS = "checkpoints of its strategy are for as many workers as have written them"

AT_ONCE = {"suspend", "activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit"}
AT_THE_END = {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "deletionStrategy"}
WRITTEN_ONCE = {"submissionMode", "jobId", "managedBy", "clusterSelector"}

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
"""What the API server writes where a RayJob says nothing, or the operator leaves out when it writes one."""

AMOUNTS = ("limits", "requests")
"""Whose values the operator writes in its own way: 2048Mi as 2Gi, 0.1 as 100m."""

LABELS = {
    "trainyard.io/run",
    "app.kubernetes.io/managed-by",
    GANG_LABEL,
    APPLICATION_LABEL,
    *QUEUE_LABELS.values(),
    *PRIORITY_LABELS.values(),
}
"""Labels of a RayJob that are ours; controllers add others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One value that differs."""

    path: str
    before: Any
    after: Any
    effect: Effect
    why: str


def diff_jobs(before: Object, after: Object, *, live: bool) -> tuple[Change, ...]:
    """What differs between a RayJob of the cluster and one that is rendered now."""
    before, after = _comparable(before), _comparable(after)
    is_fixed = _has_fixed_workers(before) and _has_fixed_workers(after)
    return tuple(
        Change(path=path, before=old, after=new, effect="refused", why=FIXED_WORKERS)
        if path == NUM_WORKERS and is_fixed
        else _classify(path, old, new, live)
        for path, old, new in differences(before, after)
    )


def _has_fixed_workers(job: Object) -> bool:
    config = job.get(CONFIG)
    return isinstance(config, dict) and has_fixed_workers(config.get("train"))


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, old and new value of each leaf that differs; what is absent is None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            below = f"{path}[{key}]" if "/" in key else f"{path}.{key}".lstrip(".")
            yield from differences(before.get(key), after.get(key), below)
    elif before != after:
        yield path, before, after


def require_same_identity(submissions: Sequence[Object], after: Object) -> None:
    """Raises ConfigError, field by field, if a RayJob would make another model than all of its run before.

    The driver compares with the run's folder; here it costs no GPU, where a RayJob is left whose driver
    has begun. One that agrees is enough: the others may be those that the driver refused.
    """
    begun = [job for job in submissions if _has_begun(job)]
    refusals = [_refused(before, after) for before in begun]
    if not refusals or not all(refusals):
        return
    run = after["metadata"]["labels"]["trainyard.io/run"]
    raise ConfigError(
        f"run {run} exists, as {begun[-1]['metadata']['name']}, and this run file is another one",
        *(f"{one.path}: {one.before} -> {one.after}: {one.why}" for one in refusals[-1]),
        "Give this one another name (--name), or set the folder of the old one aside (--fresh).",
    )


def _refused(before: Object, after: Object) -> list[Change]:
    return [one for one in diff_jobs(before, after, live=False) if one.effect == "refused"]


def _has_begun(job: Object) -> bool:
    """Whether its driver may have written to the run's folder."""
    status = job.get("status", {})
    return bool(status.get("jobStatus") or status.get("failed") or status.get("succeeded"))


def _comparable(job: Object) -> Object:
    """What a person decides of a RayJob: no status, nothing of the API server's, lists by name."""
    metadata, spec = job["metadata"], dict(job.get("spec", {}))
    labels = {key: value for key, value in metadata.get("labels", {}).items() if key in LABELS}
    # Where Kueue lets a job start, it is Kueue that changes this.
    if QUEUE_LABELS["kueue"] in labels:
        spec.pop("suspend", None)
    named: Object = by_name(spec)
    return {"metadata": {"labels": labels}, "spec": named, CONFIG: _take_config(named)}


def by_name(node: Any) -> Any:
    """Lists of named things as mappings, and nothing that only says a default."""
    if isinstance(node, dict):
        kept = {
            key: same_amounts(value) if key in AMOUNTS else by_name(value)
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


def same_amounts(node: Any) -> Any:
    """Quantities by resource, equal ones alike; what is none stays as it stands."""
    if not isinstance(node, dict):
        return by_name(node)
    return {name: _same_amount(amount) for name, amount in node.items()}


def _same_amount(amount: Any) -> Any:
    try:
        exact = quantity(amount)
    except ValueError:
        return amount
    units = ("Ti", "Gi", "Mi", "Ki") if str(amount).endswith("i") else ("", "m")
    for unit in units:
        if (count := exact / SUFFIXES[unit]).denominator == 1:
            return f"{count}{unit}"
    return amount


def _take_config(spec: Object) -> Any:
    """The config out of the head's variables: parsed, or as it stands if it is none."""
    here: Any = spec
    for key in ("rayClusterSpec", "headGroupSpec", "template", "spec", "containers"):
        here = here.get(key) if isinstance(here, dict) else None
    for container in here.values() if isinstance(here, dict) else ():
        environment = container.get("env") if isinstance(container, dict) else None
        if isinstance(environment, dict) and CONFIG_VARIABLE in environment:
            environment.pop(CODE_VARIABLE, None)  # the config has its SHA-256
            environment.pop(submission.VARIABLE, None)  # it tells of the other fields
            text = environment.pop(CONFIG_VARIABLE).get("value", "")
            try:
                return json.loads(text.replace("$$", "$"))
            except json.JSONDecodeError:
                return text
    return None


def _classify(path: str, before: Any, after: Any, live: bool) -> Change:
    effect, why = _effect(path, before, after)
    if not live and effect in ("at once", "new submission"):
        effect, why = "next attempt", "the submission has ended; the next one has it"
    return Change(path=path, before=before, after=after, effect=effect, why=why)


def _effect(path: str, before: Any, after: Any) -> tuple[Effect, str]:
    root, *keys = path.split(".")
    if root == CONFIG:
        return _config_effect(keys, before, after)
    if root == "metadata":
        if path.removesuffix("]").partition("[")[2] in QUEUE_LABELS.values():
            return "new submission", "a queue takes a job in when it is created"
        return "next attempt", "KubeRay copies labels to the RayCluster of each attempt"
    field = keys[0] if keys else ""
    if field in AT_ONCE:
        return "at once", "KubeRay reads it all the time"
    if field in AT_THE_END:
        return "at once", "KubeRay reads it at the end"
    if field in WRITTEN_ONCE:
        return "new submission", "KubeRay reads it when the job is created"
    return "next attempt", "each attempt has a RayCluster of its own"


def _config_effect(keys: list[str], before: Any, after: Any) -> tuple[Effect, str]:
    section, *rest = keys or [""]
    key = rest[0] if rest else ""
    if section == "train" and key in LENGTHS:
        if isinstance(before, int) and isinstance(after, int) and after < before:
            return "refused", "it may only be raised"
        return "next attempt", "the run goes on for longer"
    if section in MAY_CHANGE and key not in MAY_CHANGE[section]:
        return "refused", "it decides what is learnt, and belongs to the run's identity"
    if section == "storage":
        return "next attempt", "the run's folder is another one: it begins anew there"
    return "next attempt", "the driver reads its config when an attempt begins"
