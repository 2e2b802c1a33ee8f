"""Compare two platforms, for example before and after an upgrade of the chart, and say what each
change affects.

The pods that pull the image in advance are not in the platform, because no run depends on them. Their
templates are in the DaemonSets of the namespace and of the rendered chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import ConfigError
from trainyard.labels import PRE_PULL_LABEL
from trainyard.planning.comparison.run_diff import by_name, differences
from trainyard.platform import CONFIG_MAP, CONFIG_MAP_KEY, Platform, parse_platform

Object = dict[str, Any]

RUNNING = "submitted runs are not affected, because their RayJobs do not change"

AFFECTED = {
    "formatVersion": "all launchers: they must support this format",
    "kuberay": "the rules by which later runs are checked",
    "readerPod": "the next command that reads a run's folder, and the next `trainyard preflight`",
    "defaultPools": "later runs that name no pool",
    "job": "later runs",
    "queue": "later runs",
    "notify": "later runs whose run file has no notify",
    "dataVolumes": "later runs that mount that volume; the standing cluster, which is recreated",
    "runs": "which run files the launcher accepts from now on",
    "autoscaler": "later elastic runs",
    "standingCluster": "the standing cluster, and later runs that use it",
    "head": "the heads of later runs; the standing cluster, which is recreated if its head's size changes",
    "pools": "later runs on that pool; the standing cluster if it uses that pool, which is then recreated",
    "image": "later runs that name no image; the standing cluster, which is recreated",
    "rayVersion": "later runs; the standing cluster, which is recreated",
    "storage": "later runs: they start from the beginning, because their folders are in another storage",
}
"""What a change of each top-level key affects. The pod templates, `rayClusterSpec`, are not listed
here."""


POD_DEFAULTS: Object = {
    "dnsPolicy": "ClusterFirst",
    "restartPolicy": "Always",
    "schedulerName": "default-scheduler",
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
}
"""Values that the API server adds to the template of a DaemonSet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformChange:
    """A value that differs between two platforms, or between their pre-pull pods."""

    path: str
    before: Any
    """The value in the first platform; None if it is absent."""
    after: Any
    """The value in the second platform; None if it is absent."""
    affects: str
    """Which runs and clusters the change affects."""


def diff_platforms(before: Platform, after: Platform) -> tuple[PlatformChange, ...]:
    """List the values that differ between two platforms."""
    return tuple(
        PlatformChange(path=path, before=old, after=new, affects=_affected(path))
        for path, old, new in differences(_comparable(before), _comparable(after))
    )


def pre_pull_pods(objects: Iterable[Any]) -> dict[str, Object]:
    """Find the DaemonSets that pull the image in advance, and return their pod templates by pool."""
    templates = {}
    for document in objects:
        spec = document.get("spec") if isinstance(document, dict) else None
        selector = (spec or {}).get("selector") or {}
        pool = (selector.get("matchLabels") or {}).get(PRE_PULL_LABEL)
        if spec is not None and pool is not None:
            templates[pool] = spec["template"]
    return templates


def diff_pre_pull(
    before: Mapping[str, Object], after: Mapping[str, Object]
) -> tuple[PlatformChange, ...]:
    """List what differs between the pre-pull pods of two platforms, by pool."""
    changes = []
    for pool in sorted(before.keys() | after.keys()):
        old, new = (_template(templates.get(pool)) for templates in (before, after))
        if old is None or new is None:
            ends = "are created" if old is None else "are deleted"
            found = [("", old and "present", new and "present")]
        else:
            ends = "are replaced"
            found = list(differences(old, new))
        changes += [
            PlatformChange(
                path=f"prePull.{pool}.{path}".rstrip("."),
                before=was,
                after=becomes,
                affects=f"the pre-pull pods of pool {pool}, which {ends} at once",
            )
            for path, was, becomes in found
        ]
    return tuple(changes)


def _template(template: Object | None) -> Object | None:
    """Reduce the template of pre-pull pods to what the chart sets."""
    reduced: Object | None = None if template is None else by_name(_without_defaults(template))
    return reduced


def _without_defaults(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_defaults(item) for item in node]
    if not isinstance(node, dict):
        return node
    # The API server writes the name of the account into this old field too.
    kept = {key: value for key, value in node.items() if key != "serviceAccount"}
    return {
        key: _without_defaults(value)
        for key, value in kept.items()
        if POD_DEFAULTS.get(key) != value
    }


def platform_of_manifests(documents: list[Any], source: str) -> Platform:
    """Find the chart's ConfigMap among the objects that `helm template` prints, and parse the
    platform in it.

    Raises ConfigError if there is no such ConfigMap.
    """
    for document in documents:
        if not isinstance(document, dict):
            continue
        name = (document.get("metadata") or {}).get("name")
        if document.get("kind") == "ConfigMap" and name == CONFIG_MAP:
            return parse_platform(document["data"][CONFIG_MAP_KEY], f"{source}: {CONFIG_MAP}")
    raise ConfigError(
        f"{source} holds no ConfigMap {CONFIG_MAP}",
        "Give a platform file (`trainyard platform get`), or what `helm template` prints of the chart.",
    )


def _comparable(platform: Platform) -> Object:
    document: Object = by_name(platform.model_dump(mode="json", by_alias=True))
    return document


def _affected(path: str) -> str:
    first, *rest = path.split(".")
    if first != "rayClusterSpec":
        return AFFECTED[first.partition("[")[0]]
    if "tolerations" in rest:
        return "later runs; the standing cluster when another of its fields changes as well"
    if rest[:1] == ["workerGroupSpecs"]:
        standing = "the standing cluster if it uses that pool, which is then recreated"
        return f"later runs on pool {rest[1]}; {standing}"
    return "later runs; the standing cluster, which is recreated"
