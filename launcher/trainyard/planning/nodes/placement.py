"""Place the workers of a run: on several pools, and packed by a label of nodes.

`resources.pool` may be a list of pools, with the preferred one first. KubeRay has no choice between worker
groups, so the run has one group, whose pods may use the nodes of any pool of the list. Without Kueue the
scheduler chooses a node for each pod, and prefers earlier pools. Kueue chooses one pool for all pods: the
first ResourceFlavor of its ClusterQueue that has room.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from trainyard.errors import ConfigError
from trainyard.planning.comparison.run_diff import by_name, differences
from trainyard.planning.nodes.affinity import REQUIRED, node_terms
from trainyard.platform import Platform, Pool
from trainyard.quantities import Object
from trainyard.run_file.models import POOL_LIMIT, RunConfig
from trainyard.run_file.queue import TopologyMode

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

TOPOLOGY_ANNOTATIONS: Mapping[TopologyMode, str] = {
    mode: f"kueue.x-k8s.io/podset-{mode}-topology" for mode in get_args(TopologyMode)
}
"""The annotations by which Kueue packs the pods of a group. The value of `unconstrained` is `true`, that of
the others is the label of nodes."""

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


def worker_group(
    platform: Platform, pools: Sequence[str], topology_mode: TopologyMode | None = None
) -> Object:
    """Build the shape of a group of Ray pods that may use the nodes of each of these pools.

    The group has the name of the first pool, and is packed as the pool says, or the run with `topology_mode`.
    """
    group = copy.deepcopy(platform.worker_group(pools[0]))
    if topology_mode is not None:
        _set_packing(group["template"], topology_mode)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How the pods of a template are packed by a label of nodes."""

    mode: TopologyMode
    label: str | None
    """The label; None if Kueue only looks for a node for each pod."""
    is_by_kueue: bool

    def __str__(self) -> str:
        """Say how the pods are packed."""
        if self.mode == "required":
            return f"all on nodes with the same {self.label}, or the run waits"
        if self.mode == "preferred":
            return f"packed by {self.label} if possible"
        return "not packed; Kueue looks for a node for each pod"


def packing_of(template: Object) -> Packing | None:
    """Return how the pods of a template are packed (`topologyKey` and `topologyMode`), or None."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    for mode, key in TOPOLOGY_ANNOTATIONS.items():
        if key in annotations:
            label = None if mode == "unconstrained" else str(annotations[key])
            return Packing(mode=mode, label=label, is_by_kueue=True)
    for term in _packing_terms(template):
        label = str(term["podAffinityTerm"]["topologyKey"])
        return Packing(mode="preferred", label=label, is_by_kueue=False)
    return None


def require_topology(run: RunConfig, pools: Sequence[Pool], platform: Platform) -> None:
    """Raise ConfigError if the workers of a run cannot be packed as the run asks."""
    mode = run.resources.topology_mode
    if mode is None:
        return
    asked = f"resources.topology_mode = {mode}"
    name = pools[0].name
    packing = packing_of(platform.worker_group(name)["template"])
    if packing is None:
        raise ConfigError(
            f"{asked}, but pool {name} has no topologyKey, the label by which workers are packed",
            f"Remove it, or set topologyKey of pool {name} in the chart's values.",
        )
    if mode == "required" and not packing.is_by_kueue:
        raise ConfigError(
            f"{asked} needs Kueue, and the platform's queue system is {platform.queue.system}: the scheduler "
            "places one pod after the other and cannot know whether all of them have room",
            "Use preferred, or set queue.system to kueue in the chart's values.",
        )
    if packing.label is None and mode != "unconstrained":
        raise ConfigError(
            f"{asked}, but pool {name} has topologyMode unconstrained",
            f"Remove it, or set topologyMode of pool {name} to preferred in the chart's values: run files "
            "can choose another mode then.",
        )


def _set_packing(template: Object, mode: TopologyMode) -> None:
    """Replace how the pods of a template are packed. `require_topology` has checked that it is possible."""
    packing = packing_of(template)
    assert packing is not None
    if packing.is_by_kueue:
        annotations = template["metadata"]["annotations"]
        del annotations[TOPOLOGY_ANNOTATIONS[packing.mode]]
        value = "true" if mode == "unconstrained" else packing.label
        annotations[TOPOLOGY_ANNOTATIONS[mode]] = value
    elif mode == "unconstrained":
        affinity = template["spec"]["affinity"]["podAffinity"]
        packing_terms = _packing_terms(template)
        affinity[PREFERRED] = [each for each in affinity[PREFERRED] if each not in packing_terms]


def _packing_terms(template: Object) -> list[Object]:
    """Return the preferences of pods for the nodes of other workers of the same RayCluster."""
    affinity = (template["spec"].get("affinity") or {}).get("podAffinity") or {}
    return [
        each
        for each in affinity.get(PREFERRED) or ()
        if "ray.io/cluster" in (each["podAffinityTerm"].get("matchLabelKeys") or ())
    ]


def _pod_spec(platform: Platform, pool: str) -> Object:
    spec: Object = platform.worker_group(pool)["template"]["spec"]
    return spec


def _node_affinity(pod_spec: Object) -> Object:
    """Return the node affinity of a pod; it is added if the pod has none."""
    affinity: Object = pod_spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    return affinity
