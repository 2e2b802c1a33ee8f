"""Two platforms: what differs, and whom it reaches. An upgrade of the chart is told in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.errors import ConfigError
from trainyard.planning.diff import by_name, differences
from trainyard.platform import CONFIG_MAP, CONFIG_MAP_KEY, Platform, parse_platform

Object = dict[str, Any]

RUNNING = "runs that were submitted keep what they have: a RayJob is written once"

NO_PODS = {
    "formatVersion": "launchers, which must know this format",
    "kuberay": "the rules by which later runs are checked",
    "readerPod": "the next look into a run's folder",
    "defaultPools": "later runs that name no pool",
    "job": "later runs",
    "queue": "later runs",
    "autoscaler": "later runs that are elastic",
    "head": "the heads of later runs",
    "pools": "later runs on that pool",
    "image": "later runs that name no image",
    "rayVersion": "later runs",
    "storage": "later runs: they begin anew, for their folders lie elsewhere",
}
"""What the launcher reads, by the first key; the shape of pods is `rayClusterSpec`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformChange:
    """One value that differs."""

    path: str
    before: Any
    after: Any
    reaches: str


def diff_platforms(before: Platform, after: Platform) -> tuple[PlatformChange, ...]:
    """What differs between two platforms."""
    return tuple(
        PlatformChange(path=path, before=old, after=new, reaches=_reach(path))
        for path, old, new in differences(_comparable(before), _comparable(after))
    )


def platform_of_manifests(documents: list[Any], source: str) -> Platform:
    """The platform in a platform file, or in what `helm template` prints of the chart."""
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


def _reach(path: str) -> str:
    first, *rest = path.split(".")
    if first != "rayClusterSpec":
        return NO_PODS.get(first.partition("[")[0], "later runs")
    if "tolerations" in rest:
        return "later runs; the standing cluster when something else of it changes, too"
    if rest[:1] == ["workerGroupSpecs"]:
        return f"later runs on pool {rest[1]}; the standing cluster if it uses that pool: it is made anew"
    return "later runs; the standing cluster, which is made anew"
