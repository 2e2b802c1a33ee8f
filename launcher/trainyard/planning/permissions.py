"""Check what a run file sets of its pods against what the platform permits: `runs` of the chart's values.

Each key of a run file that reaches into pods has one function in `CHECKS`, which yields its problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from trainyard.errors import ConfigError
from trainyard.platform import Platform
from trainyard.run_file.models import RunConfig


def require_permissions(run: RunConfig, platform: Platform) -> None:
    """Raise ConfigError that names everything that the platform does not permit, and who can change it."""
    problems = [problem for check in CHECKS for problem in check(run, platform)]
    if problems:
        raise ConfigError(
            f"run {run.name} sets what the platform does not permit",
            *problems,
            "Remove it, or ask the platform's administrator, who can change these values of the chart with "
            "`helm upgrade`.",
        )


def _variables(run: RunConfig, platform: Platform) -> Iterator[str]:
    """Yield the variables whose names the platform denies."""
    for key, names in (("env", run.env), ("secrets", run.secrets)):
        for name in names:
            if pattern := _matching(name, platform.runs.env.deny):
                yield f"{key}.{name}: the name matches {pattern} of runs.env.deny"


def _secrets(run: RunConfig, platform: Platform) -> Iterator[str]:
    """Yield the Secrets that the platform does not offer to runs."""
    permitted = platform.runs.secrets
    for variable, secret in run.secrets.items():
        if not _matching(secret.name, permitted):
            yield f"secrets.{variable}.name = {secret.name}: runs.secrets {_listed(permitted)}"


def _receiver(run: RunConfig, platform: Platform) -> Iterator[str]:
    """Yield the Secret of `notify` if the platform does not offer it; its own is permitted."""
    secret, permitted = run.notify and run.notify.secret, platform.runs.secrets
    its = platform.notify and platform.notify.secret
    if secret and secret != its and not _matching(secret.name, permitted):
        yield f"notify.secret.name = {secret.name}: runs.secrets {_listed(permitted)}"


def _metadata(run: RunConfig, platform: Platform) -> Iterator[str]:
    """Yield labels and annotations that the platform does not permit, or that its pods already have."""
    permitted = platform.runs.labels
    shape = platform.ray_cluster_spec
    groups = (shape["headGroupSpec"], *shape["workerGroupSpecs"])
    for field, pairs in (("labels", run.labels), ("annotations", run.annotations)):
        taken = {key for group in groups for key in _of_pods(group, field)}
        for key in pairs:
            if not _matching(key, permitted):
                yield f"{field}.{key}: runs.labels {_listed(permitted)}"
            elif key in taken:
                yield f"{field}.{key}: the pods of the platform have it already (pod.{field} of the chart)"


def _of_pods(group: dict[str, Any], field: str) -> dict[str, str]:
    """Return the labels or annotations that the platform gives the pods of a group."""
    return (group["template"].get("metadata") or {}).get(field) or {}


def _matching(name: str, patterns: Sequence[str]) -> str | None:
    """Return the first pattern that a name matches; None if it matches none."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _volumes(run: RunConfig, platform: Platform) -> Iterator[str]:
    """Yield the data volumes that the platform does not offer to runs."""
    permitted = platform.runs.volumes
    for name in run.volumes:
        if not _matching(name, permitted):
            yield f"volumes: {name}: runs.volumes {_listed(permitted)}"


def _listed(patterns: Sequence[str]) -> str:
    """Say which names a value permits."""
    return f"permits only {', '.join(patterns)}" if patterns else "permits none"


CHECKS: tuple[Callable[[RunConfig, Platform], Iterator[str]], ...] = (
    _variables,
    _secrets,
    _receiver,
    _volumes,
    _metadata,
)
"""The check of each key."""
