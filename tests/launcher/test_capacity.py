"""What nodes have, what runs on them, and whether a run fits: exact, from objects alone."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.planning.capacity import (
    Node,
    gpu_nodes,
    gpus_of_pools,
    may_hold,
    nodes_of,
    places,
    require_room,
    room_reasons,
    rooms_for,
)
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
def test_what_is_no_quantity_is_refused(text: str) -> None:
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
def test_selector_and_tolerations_decide_where_a_pod_may_go(
    selector: dict[str, str], tolerations: list[Object], may: bool
) -> None:
    (one,) = nodes_of([gpu_node("a", labels={"zone": "a"})], [])
    assert may_hold(one, {"nodeSelector": selector, "tolerations": tolerations}) is may


def test_kubernetes_own_taints_close_a_node_for_now_alone() -> None:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    (one,) = nodes_of([node("a", cordoned=True, taints=[taint])], [])
    assert may_hold(one, {})
    assert not one.is_open


def test_a_place_needs_every_resource() -> None:
    room = {"cpu": Fraction(9), "memory": Fraction(100), "pods": Fraction(110)}
    assert places(room, {"cpu": Fraction(2), "memory": Fraction(30)}) == 3
    assert places(room, {"cpu": Fraction(2), "nvidia.com/gpu": Fraction(1)}) == 0
    assert places(room | {"pods": Fraction(1)}, {"cpu": Fraction(2)}) == 1
    assert places({"cpu": Fraction(-1), "pods": Fraction(1)}, {"cpu": Fraction(2)}) == 0


def job_of(platform: Platform, *settings: str, **resources: str) -> Object:
    plan = plan_run(load_run(DIGITS, settings, **resources), platform, "team")
    return merge(render_job(plan), platform, plan)


def reasons(job: Object, nodes: list[Object], pods: list[Object]) -> dict[str, tuple[str, str]]:
    rooms = rooms_for(job, nodes_of(nodes, pods))
    require_room(rooms)
    return {row.name: (row.value, row.why) for row in room_reasons(rooms)}


def refusal(job: Object, nodes: list[Object], pods: list[Object] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        require_room(rooms_for(job, nodes_of(nodes, pods or [])))
    return str(raised.value)


def test_an_idle_cluster_has_what_the_run_needs(platform: Platform) -> None:
    found = reasons(job_of(platform, gpus="16"), [gpu_node("a"), gpu_node("b"), node("c")], [])
    assert found["free now: gpu"][0] == "2 of 2 pods"
    assert found["free now: head"][0] == "1 of 1 pod"


def test_a_busy_cluster_is_no_error_and_is_told(platform: Platform) -> None:
    held = pod("other", "a", {"containers": [container("8", gpus=8)]})
    nodes = [gpu_node("a"), gpu_node("b"), node("c")]
    value, why = reasons(job_of(platform, gpus="16"), nodes, [held])["free now: gpu"]
    assert value == "1 of 2 pods"
    assert "3 nodes may hold them, 2 fit if nothing else ran" in why
    assert "the cluster is busy, short of nvidia.com/gpu: the run waits until there is room" in why


def test_closed_nodes_are_counted_as_possible_and_not_as_free(platform: Platform) -> None:
    nodes = [gpu_node("a", cordoned=True), gpu_node("b", ready="Unknown"), node("c")]
    value, why = reasons(job_of(platform, gpus="16"), nodes, [])["free now: gpu"]
    assert value == "0 of 2 pods"
    assert "2 cordoned or not ready" in why


def test_nodes_of_another_shape_than_the_pool_says_are_named(platform: Platform) -> None:
    message = refusal(job_of(platform, gpus="16"), [gpu_node("a", 4), gpu_node("b", 4), node("c")])
    assert "gpu is 2 pods with cpu 64, memory 480 GiB, nvidia.com/gpu 8" in message
    assert "3 nodes may hold them, and could hold 0" in message
    assert "2 nodes (a, b) have nvidia.com/gpu 4, a pod takes 8" in message


def test_too_few_nodes_can_never_hold_a_run(platform: Platform) -> None:
    assert "could hold 1 if nothing else ran" in refusal(
        job_of(platform, gpus="16"), [gpu_node("a"), node("c")]
    )


def test_what_each_node_has_to_run_itself_is_never_free(platform: Platform) -> None:
    agent = pod("agent", "a", {"containers": [container("40")]}, owner="DaemonSet")
    message = refusal(job_of(platform, gpus="8"), [gpu_node("a"), node("c")], [agent])
    assert "node a has cpu 56, a pod takes 64" in message


def test_pods_of_one_run_do_not_share_a_place(platform: Platform) -> None:
    # One node for a worker and the head: each fits, both do not.
    nodes = [node("a", cpus=2, memory="5Gi")]
    found = reasons(job_of(platform, workers="1"), nodes, [])
    assert (found["free now: cpu"][0], found["free now: head"][0]) == ("1 of 1 pod", "0 of 1 pod")


def test_an_elastic_run_needs_its_fewest_nodes_and_tells_of_the_rest(platform: Platform) -> None:
    nodes = [gpu_node("a"), gpu_node("b"), node("c")]
    held = pod("other", "a", {"containers": [container("8", gpus=8)]})
    value, why = reasons(job_of(platform, gpus="8:16"), nodes, [held])["free now: gpu"]
    assert value == "1 of 2 pods"
    assert "the run starts, and grows when there is room" in why
    batch = "train.global_batch_size=96"
    assert "gpu is 3 pods" in refusal(job_of(platform, batch, gpus="24:32"), nodes)


def test_rays_autoscaler_needs_room_beside_the_head(platform: Platform) -> None:
    fixed, elastic = (
        rooms_for(job_of(platform, gpus=gpus), nodes_of([], []))[-1].need.request
        for gpus in ("16", "8:16")
    )
    assert elastic["cpu"] - fixed["cpu"] == Fraction(1, 10)


def test_gpus_are_shown_with_their_pool_and_who_holds_them() -> None:
    nodes = nodes_of(
        [gpu_node("a"), node("c"), gpu_node("z", cordoned=True)],
        [
            pod("w1", "a", {"containers": [container("1", gpus=2)]}, run="digits"),
            pod("x", "a", {"containers": [container("1", gpus=4)]}),
            pod("none", "a", {"containers": [container("1")]}),
        ],
    )
    tolerating = {"tolerations": [{"operator": "Exists"}]}
    found = gpu_nodes(nodes, {"big": ("nvidia.com/gpu", tolerating), "m": ("other/gpu", {})})
    assert [(one.node, one.pools, one.total, one.used, one.free) for one in found] == [
        ("a", ("big",), 8, 6, 2),
        ("z", ("big",), 8, 0, 0),
    ]
    assert [(one.pod, one.run, one.amount) for one in found[0].holders] == [
        ("x", None, 4),
        ("w1", "digits", 2),
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


def test_nodes_come_by_name() -> None:
    found: tuple[Node, ...] = nodes_of([node("b"), node("a")], [])
    assert [one.name for one in found] == ["a", "b"]
