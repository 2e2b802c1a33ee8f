"""Capacity of a cluster, from parsed objects: what nodes have, what runs there, whether a run fits."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from trainyard.cli.show import holder_text
from trainyard.errors import ConfigError
from trainyard.planning.capacity.fit import capacity_rows, fit_groups, require_capacity
from trainyard.planning.capacity.gpus import gpu_nodes, gpus_of_pools
from trainyard.planning.capacity.nodes import Node, accepts, count_fitting_pods, nodes_of
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import Platform
from trainyard.quantities import quantity, requests_of
from trainyard.run_file.load import load_run

Object = dict[str, Any]
DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("64", 64),
        ("0", 0),
        ("100m", Fraction(1, 10)),
        ("1500u", Fraction(3, 2000)),
        ("3n", Fraction(3, 10**9)),
        ("480Gi", 480 * 2**30),
        ("1.5Ki", 1536),
        ("129e6", 129_000_000),
        ("2E3", 2000),
        ("2E", 2 * 10**18),
        ("1e-3", Fraction(1, 1000)),
        ("12k", 12_000),
        ("5M", 5_000_000),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("-2Mi", -(2**21)),
        (8, 8),
    ],
)
def test_quantities_are_exact(text: str, amount: Fraction) -> None:
    assert quantity(text) == amount


@pytest.mark.parametrize("text", ["", "8 Gi", "8gi", "8KI", "1e", "Gi", "1.2.3", "0x8", "e3"])
def test_a_text_that_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


def container(cpu: str | None = None, *, gpus: int = 0, **more: Any) -> Object:
    requests = {"cpu": cpu} if cpu else {}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {"resources": {"requests": requests, "limits": limits}, **more}


def pod(
    name: str, node: str, spec: Object, *, phase: str = "Running", owner: str = "RayCluster",
    run: str | None = None,
) -> Object:  # fmt: skip
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "labels": {"trainyard.io/run": run} if run else {},
            "ownerReferences": [{"kind": owner}],
        },
        "spec": {**spec, "nodeName": node},
        "status": {"phase": phase},
    }


def node(
    name: str, *, cpus: int = 96, memory: str = "600Gi", ready: str = "True",
    cordoned: bool = False, labels: dict[str, str] | None = None,
    taints: list[Object] | None = None, **resources: int,
) -> Object:  # fmt: skip
    extended = {name.replace("_", "/", 1): str(count) for name, count in resources.items()}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"unschedulable": cordoned, "taints": taints or []},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {"cpu": str(cpus), "memory": memory, "pods": "110"}
            | {key.replace("nvidia/", "nvidia.com/"): value for key, value in extended.items()},
        },
    }


def gpu_node(name: str, gpus: int = 8, **more: Any) -> Object:
    return node(name, taints=[GPU_TAINT], nvidia_gpu=gpus, **more)


def cpu(amounts: dict[str, Fraction]) -> Fraction:
    return amounts["cpu"]


def test_a_pod_takes_the_sum_of_its_containers() -> None:
    spec = {"containers": [container("500m"), container("2", gpus=4)]}
    assert requests_of(spec) == {"cpu": Fraction(5, 2), "nvidia.com/gpu": 4}


def test_init_containers_count_where_they_are_larger() -> None:
    containers = {"containers": [container("1")]}
    assert cpu(requests_of({**containers, "initContainers": [container("3")]})) == 3
    assert cpu(requests_of({**containers, "initContainers": [container("500m")]})) == 1


def test_a_sidecar_stays_beside_containers_and_later_init_containers() -> None:
    sidecar = container("2", restartPolicy="Always")
    spec = {"containers": [container("1")], "initContainers": [sidecar, container("4")]}
    assert cpu(requests_of(spec)) == 6
    spec["initContainers"] = [container("4"), sidecar]
    assert cpu(requests_of(spec)) == 4


def test_a_pods_own_numbers_and_its_overhead_count() -> None:
    spec = {
        "containers": [container("1")],
        "resources": {"requests": {"cpu": "3"}},
        "overhead": {"cpu": "250m"},
    }
    assert cpu(requests_of(spec)) == Fraction(13, 4)


def test_pods_that_have_ended_or_have_no_node_hold_nothing() -> None:
    spec = {"containers": [container("4")]}
    (one,) = nodes_of(
        [node("a")],
        [
            pod("runs", "a", spec),
            pod("ended", "a", spec, phase="Succeeded"),
            pod("failed", "a", spec, phase="Failed"),
            pod("waits", "", spec, phase="Pending"),
        ],
    )
    assert (one.used["cpu"], one.free()["cpu"], one.free()["pods"]) == (4, 92, 109)


@pytest.mark.parametrize(
    ("selector", "tolerations", "may"),
    [
        ({}, [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}], True),
        ({}, [{"operator": "Exists"}], True),
        ({}, [{"key": "nvidia.com/gpu", "value": "present"}], True),
        ({}, [{"key": "nvidia.com/gpu", "value": "absent"}], False),
        ({}, [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ({}, [], False),
        ({"zone": "a"}, [{"operator": "Exists"}], True),
        ({"zone": "b"}, [{"operator": "Exists"}], False),
    ],
)
def test_selector_and_tolerations_decide_which_nodes_accept_a_pod(
    selector: dict[str, str], tolerations: list[Object], may: bool
) -> None:
    (one,) = nodes_of([gpu_node("a", labels={"zone": "a"})], [])
    assert accepts(one, {"nodeSelector": selector, "tolerations": tolerations}) is may


def test_a_cordoned_node_accepts_a_pod_later_but_is_not_open_now() -> None:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    (one,) = nodes_of([node("a", cordoned=True, taints=[taint])], [])
    assert accepts(one, {})
    assert not one.is_open


def test_a_pod_fits_only_if_every_resource_is_free() -> None:
    free = {"cpu": Fraction(9), "memory": Fraction(100), "pods": Fraction(110)}
    assert count_fitting_pods(free, {"cpu": Fraction(2), "memory": Fraction(30)}) == 3
    assert count_fitting_pods(free, {"cpu": Fraction(2), "nvidia.com/gpu": Fraction(1)}) == 0
    assert count_fitting_pods(free | {"pods": Fraction(1)}, {"cpu": Fraction(2)}) == 1
    overfull = {"cpu": Fraction(-1), "pods": Fraction(1)}
    assert count_fitting_pods(overfull, {"cpu": Fraction(2)}) == 0


def job_of(platform: Platform, *settings: str, **resources: str) -> Object:
    plan = plan_run(load_run(DIGITS, settings, **resources), platform, "team")
    return merge(render_job(plan), platform, plan)


def reasons(job: Object, nodes: list[Object], pods: list[Object]) -> dict[str, tuple[str, str]]:
    fits = fit_groups(job, nodes_of(nodes, pods))
    require_capacity(fits)
    return {row.name: (row.value, row.why) for row in capacity_rows(fits)}


def refusal(job: Object, nodes: list[Object], pods: list[Object] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        require_capacity(fit_groups(job, nodes_of(nodes, pods or [])))
    return str(raised.value)


def test_an_idle_cluster_has_what_the_run_needs(platform: Platform) -> None:
    found = reasons(job_of(platform, gpus="16"), [gpu_node("a"), gpu_node("b"), node("c")], [])
    assert found["free now: gpu"][0] == "2 of 2 pods"
    assert found["free now: head"][0] == "1 of 1 pod"


def test_the_plan_for_a_busy_cluster_says_which_resource_is_lacking(platform: Platform) -> None:
    held = pod("other", "a", {"containers": [container("8", gpus=8)]})
    nodes = [gpu_node("a"), gpu_node("b"), node("c")]
    value, why = reasons(job_of(platform, gpus="16"), nodes, [held])["free now: gpu"]
    assert value == "1 of 2 pods"
    assert "3 nodes may run these pods, and 2 would fit if nothing else ran" in why
    assert "too little nvidia.com/gpu is free now: the run waits" in why


def test_closed_nodes_are_counted_as_possible_and_not_as_free(platform: Platform) -> None:
    nodes = [gpu_node("a", cordoned=True), gpu_node("b", ready="Unknown"), node("c")]
    value, why = reasons(job_of(platform, gpus="16"), nodes, [])["free now: gpu"]
    assert value == "0 of 2 pods"
    assert "2 cordoned or not ready" in why


def test_nodes_that_are_smaller_than_the_pool_says_are_named(platform: Platform) -> None:
    message = refusal(job_of(platform, gpus="16"), [gpu_node("a", 4), gpu_node("b", 4), node("c")])
    assert "gpu needs 2 pods with cpu 64, memory 480 GiB, nvidia.com/gpu 8" in message
    assert "3 nodes may run them, and 0 would fit" in message
    assert "2 nodes (a, b) have nvidia.com/gpu 4, a pod needs 8" in message


def test_a_run_with_more_pods_than_matching_nodes_is_refused(platform: Platform) -> None:
    assert "and 1 would fit if nothing else ran" in refusal(
        job_of(platform, gpus="16"), [gpu_node("a"), node("c")]
    )


def test_resources_of_daemon_sets_are_never_free(platform: Platform) -> None:
    agent = pod("agent", "a", {"containers": [container("40")]}, owner="DaemonSet")
    message = refusal(job_of(platform, gpus="8"), [gpu_node("a"), node("c")], [agent])
    assert "node a has cpu 56, a pod needs 64" in message


def test_pods_of_one_run_do_not_use_the_same_resources_twice(platform: Platform) -> None:
    # One node for a worker and the head: each fits, both do not.
    nodes = [node("a", cpus=2, memory="5Gi")]
    found = reasons(job_of(platform, workers="1"), nodes, [])
    assert (found["free now: cpu"][0], found["free now: head"][0]) == ("1 of 1 pod", "0 of 1 pod")


def test_an_elastic_run_needs_room_for_its_smallest_size(platform: Platform) -> None:
    nodes = [gpu_node("a"), gpu_node("b"), node("c")]
    held = pod("other", "a", {"containers": [container("8", gpus=8)]})
    value, why = reasons(job_of(platform, gpus="8:16"), nodes, [held])["free now: gpu"]
    assert value == "1 of 2 pods"
    assert "the run starts with fewer pods, and grows when resources become free" in why
    batch = "train.global_batch_size=96"
    assert "gpu needs 3 pods" in refusal(job_of(platform, batch, gpus="24:32"), nodes)


def test_rays_autoscaler_adds_to_the_request_of_the_head(platform: Platform) -> None:
    fixed, elastic = (
        fit_groups(job_of(platform, gpus=gpus), nodes_of([], []))[-1].group.request
        for gpus in ("16", "8:16")
    )
    assert elastic["cpu"] - fixed["cpu"] == Fraction(1, 10)


def test_gpus_of_a_node_are_listed_with_pools_and_pods() -> None:
    nodes = nodes_of(
        [gpu_node("a"), node("c"), gpu_node("z", cordoned=True)],
        [
            pod("w1", "a", {"containers": [container("1", gpus=2)]}, run="digits"),
            pod("x", "a", {"containers": [container("1", gpus=4)]}, phase="Pending"),
            pod("none", "a", {"containers": [container("1")]}),
        ],
    )
    tolerating = {"tolerations": [{"operator": "Exists"}]}
    found = gpu_nodes(nodes, {"big": ("nvidia.com/gpu", tolerating), "m": ("other/gpu", {})})
    assert [(one.node, one.pools, one.total, one.used, one.free) for one in found] == [
        ("a", ("big",), 8, 6, 2),
        ("z", ("big",), 8, 0, 0),
    ]
    assert list(map(holder_text, found[0].holders)) == [
        "team/x: 4 Pending",
        "run digits (team/w1): 2",
    ]
    assert gpus_of_pools(found) == [
        ("big", "nvidia.com/gpu", {"nodes": 2, "total": 16, "used": 6, "free": 2})
    ]


@pytest.mark.parametrize(
    ("resource", "counts"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/mig-1g.10gb", True),
        ("nvidia.com/gpu.shared", True),
        ("amd.com/gpu", True),
        ("gpu.intel.com/i915", True),
        ("vpc.amazonaws.com/efa", False),
        ("cpu", False),
        ("hugepages-2Mi", False),
    ],
)
def test_what_counts_as_gpu(resource: str, counts: bool) -> None:
    document = node("a")
    document["status"]["allocatable"][resource] = "2"
    assert [one.resource for one in gpu_nodes(nodes_of([document], []), {})] == (
        [resource] if counts else []
    )


def test_nodes_are_sorted_by_name() -> None:
    found: tuple[Node, ...] = nodes_of([node("b"), node("a")], [])
    assert [one.name for one in found] == ["a", "b"]
