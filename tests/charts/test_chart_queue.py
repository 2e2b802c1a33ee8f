"""Objects of queues, quotas, priorities and evictions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.charts.helm_chart import (
    ALL_APIS,
    CHART,
    RAY_APIS,
    Object,
    of_kind,
    only,
    platform_of,
    render,
)
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import parse_platform
from trainyard.run_file.load import load_run

DIGITS = CHART.parents[1] / "examples/digits.yaml"
UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30, "m": 0.001}
KUEUE = {
    "system": "kueue",
    "name": "runs",
    "kueue": {"clusterQueue": "vision", "nodes": {"gpu": 4, "cpu": 2}, "runs": 6},
}
EFA = {
    "ephemeralStorageGib": 100,
    "network": {"preset": "efa", "devicesPerNode": 32},
    "nodeSelector": {"machine": "p5"},
}


def number(quantity: str) -> float:
    digits, unit = re.fullmatch(r"([0-9.]+)(\w*)", quantity).groups()
    return float(digits) * UNITS[unit]


def flavors_of(objects: list[Object]) -> dict[str, dict[str, float]]:
    (group,) = only(objects, "ClusterQueue")["spec"]["resourceGroups"]
    flavors = {
        flavor["name"]: {one["name"]: number(one["nominalQuota"]) for one in flavor["resources"]}
        for flavor in group["flavors"]
    }
    # Kueue takes the resources of a group in one order only.
    assert all(list(quota) == group["coveredResources"] for quota in flavors.values())
    return flavors


@pytest.fixture(scope="module")
def queued() -> list[Object]:
    return render({"queue": KUEUE, "pools": {"gpu": EFA}})


def test_no_queue_is_made_unless_asked_for():
    kinds = {one["kind"] for one in render({"queue": {"system": "kueue", "name": "runs"}})}
    assert not kinds & {"LocalQueue", "ClusterQueue", "ResourceFlavor"}


def test_a_local_queue_leads_to_a_cluster_queue_of_others():
    objects = render({"queue": KUEUE | {"kueue": {"clusterQueue": "theirs"}}})
    assert of_kind(objects, "LocalQueue")["runs"]["spec"] == {"clusterQueue": "theirs"}
    assert of_kind(objects, "ClusterQueue") == of_kind(objects, "ResourceFlavor") == {}


def test_a_cluster_queue_serves_this_namespace_and_prefers_the_more_urgent(queued):
    spec = only(queued, "ClusterQueue")["spec"]
    assert spec["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "team-vision"}
    }
    assert spec["preemption"] == {"withinClusterQueue": "LowerPriority"}


def test_quotas_are_the_pools_numbers_times_their_nodes(queued):
    flavors = flavors_of(queued)
    assert list(flavors) == ["vision-cpu", "vision-gpu"]
    assert flavors["vision-gpu"] == {
        "cpu": 4 * 64,
        "memory": 4 * 480 * 2**30,
        "nvidia.com/gpu": 32,
        "ephemeral-storage": 400 * 2**30,
        "vpc.amazonaws.com/efa": 128,
        "hugepages-2Mi": 4 * 5120 * 2**20,
    }
    # Two nodes, six heads on nodes of the same pool, and what 4 x 8 + 2 workers add to heads.
    assert flavors["vision-cpu"]["memory"] == (2 * 4 + 6 * 4) * 2**30 + 34 * 8 * 2**20
    assert flavors["vision-cpu"]["cpu"] == 2 * 2 + 6
    assert flavors["vision-cpu"]["nvidia.com/gpu"] == 0


def test_heads_and_workers_of_the_same_nodes_share_one_flavor() -> None:
    """Kueue gives a group of pods the first flavor that fits, and could not tell two such flavors apart."""
    quotas = KUEUE | {"kueue": KUEUE["kueue"] | {"nodes": {"cpu": 2}}}
    labels = {"machine": "small"}
    pools = {"cpu": {"nodeSelector": labels}}
    for head in ({}, {"nodeSelector": labels}):
        own = flavors_of(render({"queue": quotas, "pools": pools, "head": head}))
        names = ["vision-cpu"] if head else ["vision-heads", "vision-cpu"]
        assert list(own) == names
        total = {name: sum(quota[name] for quota in own.values()) for name in ("cpu", "memory")}
        shared = flavors_of(render({"queue": quotas}))
        assert {name: shared["vision-cpu"][name] for name in total} == total


def test_a_cohort_lends_and_borrows_as_the_values_say() -> None:
    cohort = {"cohort": "all", "borrowing": False, "reclaim": "LowerPriority", "weight": 2}
    queue = KUEUE | {"kueue": KUEUE["kueue"] | cohort}
    old = [api for api in ALL_APIS if "v1beta2" not in api]
    for apis, key in ((ALL_APIS, "cohortName"), (old, "cohort")):
        spec = only(render({"queue": queue}, apis=apis), "ClusterQueue")["spec"]
        assert spec[key] == "all"
        assert spec["fairSharing"] == {"weight": "2"}
        assert spec["preemption"]["reclaimWithinCohort"] == "LowerPriority"
        (group,) = spec["resourceGroups"]
        limits = {one["borrowingLimit"] for each in group["flavors"] for one in each["resources"]}
        assert limits == {"0"}
    assert "cohortName" not in only(render({"queue": KUEUE}), "ClusterQueue")["spec"]


def requests_of(pod: Object) -> dict[str, float]:
    container = pod["template"]["spec"]["containers"][0]
    return {name: number(value) for name, value in container["resources"]["requests"].items()}


LARGE_HEAD = {"workersPerCpu": 8, "cpuRequest": 1.5, "memoryMibPerWorker": 100}


@pytest.mark.parametrize("head", [{}, LARGE_HEAD], ids=["default head", "large head"])
@pytest.mark.parametrize(
    ("pool", "nodes", "resources"),
    [
        ({}, 4, {"gpus": "32"}),
        (EFA, 4, {"gpus": "32"}),
        (EFA | {"gpusPerNode": 4, "cpuRequest": 7.5, "cpus": 16}, 3, {"gpus": "12"}),
        ({"network": {"preset": "roce", "resource": "rdma/hca"}}, 2, {"gpus": "16"}),
        (
            {"network": {"preset": "tcp"}, "gpuResource": "nvidia.com/mig-1g.10gb"},
            2,
            {"gpus": "16"},
        ),
        ({}, 0, {"workers": "2"}),
    ],
)
def test_the_quota_is_exactly_what_a_run_that_fills_it_requests(
    head: Object, pool: Object, nodes: int, resources: dict[str, str]
) -> None:
    """Kueue adds up the requests of the pods that the launcher renders."""
    counted = {"gpu": nodes} if nodes else {"cpu": 2}
    kueue = {"clusterQueue": "vision", "nodes": counted, "runs": 1}
    objects = render(
        {"queue": KUEUE | {"kueue": kueue}, "pools": {"gpu": pool}, "head": head | {"cpus": 4}}
    )
    platform = parse_platform(only(objects, "ConfigMap")["data"]["platform.yaml"], "test")
    settings = ("train.global_batch_size=96",)
    plan = plan_run(load_run(DIGITS, settings, **resources), platform, "team-vision")
    spec = merge(render_job(plan), platform, plan)["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    flavors = {
        name: {resource: amount for resource, amount in quota.items() if amount}
        for name, quota in flavors_of(objects).items()
    }
    workers = {name: group["replicas"] * amount for name, amount in requests_of(group).items()}
    heads = requests_of(spec["headGroupSpec"])
    if nodes:
        assert flavors == {"vision-heads": heads, "vision-gpu": workers}
    else:  # of the nodes of the pool
        both = {name: heads.get(name, 0) + amount for name, amount in workers.items()}
        assert flavors == {"vision-cpu": both}


def test_an_elastic_queue_has_room_for_the_autoscalers_of_its_runs() -> None:
    """Kueue counts the autoscaler's container as a part of the head."""
    kueue = KUEUE | {"kueue": KUEUE["kueue"] | {"elastic": True}}
    objects, fixed = render({"queue": kueue}), flavors_of(render({"queue": KUEUE}))
    options = platform_of(objects)["autoscaler"]["options"]["resources"]["requests"]
    for name, quantity in options.items():
        more = flavors_of(objects)["vision-cpu"][name] - fixed["vision-cpu"][name]
        assert more == pytest.approx(6 * number(quantity)), name
    assert platform_of(objects)["queue"]["elastic"] is True


def test_a_flavor_is_its_pools_nodes(queued):
    gpu = of_kind(queued, "ResourceFlavor")["vision-gpu"]["spec"]
    assert gpu["nodeLabels"] == {"machine": "p5"}
    assert gpu["nodeTaints"] == [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    assert len(of_kind(queued, "ResourceFlavor")) == 2


def test_the_version_of_kueue_is_one_that_the_cluster_serves():
    old = [api for api in ALL_APIS if "v1beta2" not in api]
    for apis, version in ((old, "v1beta1"), (ALL_APIS, "v1beta2")):
        objects = render({"queue": KUEUE}, apis=apis)
        served = {one["apiVersion"] for one in objects if "kueue" in one["apiVersion"]}
        assert served == {f"kueue.x-k8s.io/{version}"}


PRIORITY = {"name": "trainyard-urgent", "value": 1000, "description": "Deadlines."}


@pytest.mark.parametrize(
    ("system", "kind", "apis"),
    [("kueue", "WorkloadPriorityClass", ALL_APIS), ("volcano", "PriorityClass", RAY_APIS)],
)
def test_priorities_are_those_that_the_queue_system_reads(system, kind, apis):
    queue = {"system": system, "name": "runs"}
    objects = render({"queue": queue, "priorityClasses": [PRIORITY]}, apis=apis)
    made = of_kind(objects, kind)["trainyard-urgent"]
    assert (made["value"], made["description"]) == (1000, "Deadlines.")
    assert platform_of(objects)["queue"] == queue


def test_quotas_and_limits_are_taken_as_given():
    hard: dict[str, Any] = {"requests.nvidia.com/gpu": "64", "count/rayjobs.ray.io": "200"}
    limits = {"default": {"memory": "1Gi"}, "max": {"cpu": "192"}}
    objects = render({"quotas": {"hard": hard, "limitRange": limits}})
    assert only(objects, "ResourceQuota")["spec"] == {"hard": hard}
    assert only(objects, "LimitRange")["spec"] == {"limits": [{"type": "Container", **limits}]}
    assert not {"ResourceQuota", "LimitRange"} & {one["kind"] for one in render({})}


def test_pods_satisfy_a_quota_of_everything():
    """Where a quota counts requests and limits, a container without one of them is refused."""
    objects = render({"prePull": {"enabled": True}, "test": {"gpus": True}})
    pods = [platform_of(objects)["readerPod"], *of_kind(objects, "Pod").values()]
    pods += [one["spec"]["template"] for one in of_kind(objects, "DaemonSet").values()]
    assert len(pods) == 5
    for pod in pods:
        resources = pod["spec"]["containers"][0]["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]) & set(resources["limits"])


def test_no_head_is_evicted_and_workers_may_be():
    assert of_kind(render({}), "PodDisruptionBudget") == {}
    spec = only(render({"disruptionBudget": {"heads": True}}), "PodDisruptionBudget")["spec"]
    assert spec["selector"]["matchLabels"]["ray.io/node-type"] == "head"
    # An integer: a percentage, or maxUnavailable, needs an owner whose size Kubernetes can ask for.
    assert spec["minAvailable"] > 8192
    assert "maxUnavailable" not in spec


def test_the_image_is_pulled_ahead_where_its_pool_lies():
    place = {"nodeSelector": {"machine": "p5"}}
    values = {"prePull": {"enabled": True, "pools": ["gpu"]}, "pools": {"gpu": place}}
    daemons = of_kind(render(values), "DaemonSet")
    assert list(daemons) == ["trainyard-prepull-gpu"]
    spec = daemons["trainyard-prepull-gpu"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == place["nodeSelector"]
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "volumes" not in spec
    every = of_kind(render({"prePull": {"enabled": True}}), "DaemonSet")
    assert list(every) == ["trainyard-prepull-cpu", "trainyard-prepull-gpu"]
