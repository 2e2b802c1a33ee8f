"""A platform with pools of spot nodes and of others, as the chart publishes it for such values."""

from __future__ import annotations

import copy
from typing import Any

from trainyard.platform import Platform, PlatformQueue, Pool, load_platform
from trainyard.run_file.queue import TopologyMode

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SPOT_TAINT = {"key": "capacity", "operator": "Exists", "effect": "NoSchedule"}
MACHINE = {"key": "machine", "operator": "In", "values": ["p5"]}
ON_SPOT = {"key": "capacity", "operator": "In", "values": ["spot"]}
OFF_SPOT = {"key": "capacity", "operator": "NotIn", "values": ["spot"]}


def off_spot() -> dict[str, Any]:
    terms = [{"matchExpressions": [OFF_SPOT]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


def platform_with_spot(platform: Platform | None = None, **changed: Any) -> Platform:
    """The platform with pools `spot` and `on-demand` beside `cpu`, of equal sizes but for what is changed of
    `spot`: a number of the pool, or a field of its pods."""
    platform = platform or load_platform(None)
    spec = copy.deepcopy(platform.ray_cluster_spec)
    gpu = platform.worker_group("gpu")
    spot, on_demand = ({**copy.deepcopy(gpu), "groupName": name} for name in ("spot", "on-demand"))
    spot["template"]["spec"] |= {
        "nodeSelector": {"machine": "p5", "capacity": "spot"},
        "tolerations": [GPU_TAINT, SPOT_TAINT],
    }
    on_demand["template"]["spec"] |= {"nodeSelector": {"machine": "p5"}, "affinity": off_spot()}
    numbers = {key: value for key, value in changed.items() if key in Pool.model_fields}
    spot["template"]["spec"] |= {key: changed[key] for key in changed.keys() - numbers.keys()}
    spec["workerGroupSpecs"] = [platform.worker_group("cpu"), spot, on_demand]
    spec["headGroupSpec"]["template"]["spec"]["affinity"] = off_spot()
    pool = platform.pool("gpu")
    pools = (
        platform.pool("cpu"),
        pool.model_copy(update={"name": "spot", **numbers}),
        pool.model_copy(update={"name": "on-demand"}),
    )
    defaults = platform.default_pools.model_copy(update={"gpus": "on-demand"})
    return platform.model_copy(
        update={"pools": pools, "ray_cluster_spec": spec, "default_pools": defaults}
    )


def packed_platform(platform: Platform | None = None, mode: TopologyMode | None = None) -> Platform:
    """The platform with a topologyKey `rack` of its pool of GPUs: of Kueue with a mode, else of the
    scheduler."""
    platform = (platform or load_platform(None)).model_copy(deep=True)
    template = platform.worker_group("gpu")["template"]
    if mode is not None:
        value = "true" if mode == "unconstrained" else "rack"
        template["metadata"]["annotations"] = {f"kueue.x-k8s.io/podset-{mode}-topology": value}
        return platform.model_copy(update={"queue": PlatformQueue(system="kueue", name="team")})
    term = {"topologyKey": "rack", "matchLabelKeys": ["ray.io/cluster", "ray.io/group"]}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    affinity = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    template["spec"]["affinity"] = affinity
    return platform
