"""Place the workers of a run on several pools: a list in `resources.pool`, with the preferred pool first.

KubeRay has no choice between worker groups, so the run has one group, whose pods may use the nodes of any
pool of the list. Without Kueue the scheduler chooses a node for each pod, and prefers earlier pools. Kueue
chooses one pool for all pods: the first ResourceFlavor of its ClusterQueue that has room.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from trainyard.errors import ConfigError
from trainyard.planning.comparison.run_diff import by_name, differences
from trainyard.planning.node_affinity import REQUIRED, node_terms
from trainyard.platform import Platform, Pool
from trainyard.quantities import Object
from trainyard.run_file.models import POOL_LIMIT

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-preferred-topology"
"""The annotation by which Kueue packs the pods of a group."""

WEIGHTS = (100, 50, 25, 12, 6, 3, 1)
"""Weights of the pools before the last. Each is above the sum of the next ones, because the scheduler adds
the weights of all pools that a node belongs to."""
assert len(WEIGHTS) == POOL_LIMIT - 1


def require_alike(pools: Sequence[Pool], platform: Platform) -> None:
    """Raise ConfigError if one group of pods cannot use the nodes of all pools."""
    names = f"resources.pool = [{', '.join(pool.name for pool in pools)}]"
    for one, other in pairwise(pools):
        for path, first, second in _differences(one, other, platform):
            raise ConfigError(
                f"{names}: {path} is {_shown(first)} in pool {one.name} and {_shown(second)} in pool "
                f"{other.name}, but the pods of all workers are equal",
                "List pools that differ only in nodeSelector, tolerations and spot, or name one pool.",
            )
    for pool in pools if len(pools) > 1 else ():
        if not all(
            term.get("matchExpressions") for term in node_terms(_pod_spec(platform, pool.name))
        ):
            raise ConfigError(
                f"{names}: pool {pool.name} has no node selector, so its nodes cannot be told from those of "
                "other pools",
                f"Set nodeSelector of pool {pool.name} in the platform's values, or name one pool.",
            )


def _differences(one: Pool, other: Pool, platform: Platform) -> Iterator[tuple[str, Any, Any]]:
    """Yield path and values of what differs between two pools, beside their names and their nodes."""
    # The memory of a GPU changes nothing about the pods.
    own = {"name", "gpu_memory_gib"}
    first, second = (
        pool.model_dump(mode="json", by_alias=True, exclude=own) for pool in (one, other)
    )
    yield from differences(first, second)
    groups = [copy.deepcopy(platform.worker_group(pool.name)) for pool in (one, other)]
    for group in groups:
        del group["groupName"]
        spec = group["template"]["spec"]
        for key in ("nodeSelector", "tolerations"):
            spec.pop(key, None)
        _node_affinity(spec).pop(REQUIRED, None)
    yield from differences(by_name(groups[0]), by_name(groups[1]))


def _shown(value: Any) -> str:
    return "not set" if value is None else f"{value}"


def worker_group(platform: Platform, pools: Sequence[str]) -> Object:
    """Build the shape of a group of Ray pods that may use the nodes of each of these pools.

    The group has the name of the first pool.
    """
    group = copy.deepcopy(platform.worker_group(pools[0]))
    if len(pools) == 1:
        return group
    specs = [_pod_spec(platform, pool) for pool in pools]
    terms = [node_terms(spec) for spec in specs]
    spec = group["template"]["spec"]
    spec.pop("nodeSelector", None)
    affinity = _node_affinity(spec)
    affinity[REQUIRED] = {"nodeSelectorTerms": [term for one in terms for term in one]}
    # The last pool needs no weight.
    preferred = [
        {"weight": weight, "preference": copy.deepcopy(term)}
        for weight, one in zip(WEIGHTS, terms[:-1], strict=False)
        for term in one
    ]
    affinity[PREFERRED] = [*(affinity.get(PREFERRED) or []), *preferred]
    tolerations: list[Object] = []
    for one in specs:
        tolerations += [each for each in one.get("tolerations") or [] if each not in tolerations]
    if tolerations:
        spec["tolerations"] = tolerations
    return group


def packing_label(template: Object) -> str | None:
    """Return the node label by which pods of a template are packed (`topologyKey`), or None."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    if TOPOLOGY_ANNOTATION in annotations:
        return str(annotations[TOPOLOGY_ANNOTATION])
    affinity = (template["spec"].get("affinity") or {}).get("podAffinity") or {}
    for each in affinity.get(PREFERRED) or ():
        if "ray.io/cluster" in (each["podAffinityTerm"].get("matchLabelKeys") or ()):
            return str(each["podAffinityTerm"]["topologyKey"])
    return None


def _pod_spec(platform: Platform, pool: str) -> Object:
    spec: Object = platform.worker_group(pool)["template"]["spec"]
    return spec


def _node_affinity(pod_spec: Object) -> Object:
    """Return the node affinity of a pod; it is added if the pod has none."""
    affinity: Object = pod_spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    return affinity
