"""Compare two platforms, for example before and after an upgrade of the chart, and say what each
change affects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.errors import ConfigError
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
    "dataVolumes": "later runs that mount that volume; the standing cluster, which is recreated",
    "runs": "which run files the launcher accepts from now on",
    "autoscaler": "later elastic runs",
    "head": "the heads of later runs; the standing cluster, which is recreated if its head's size changes",
    "pools": "later runs on that pool; the standing cluster if it uses that pool, which is then recreated",
    "image": "later runs that name no image; the standing cluster, which is recreated",
    "rayVersion": "later runs; the standing cluster, which is recreated",
    "storage": "later runs: they start from the beginning, because their folders are in another storage",
}
"""What a change of each top-level key affects. The pod templates, `rayClusterSpec`, are not listed
here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformChange:
    """A value that differs between two platforms."""

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
