"""A run on several pools: which nodes its workers may use, and which of them are preferred."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.pools import (
    GPU_TAINT,
    MACHINE,
    OFF_SPOT,
    ON_SPOT,
    SPOT_TAINT,
    platform_with_spot,
)
from trainyard.cli.options import yaml_text
from trainyard.errors import ConfigError
from trainyard.planning.capacity.fit import capacity_rows, fit_groups
from trainyard.planning.capacity.gpus import gpu_nodes
from trainyard.planning.capacity.nodes import accepts, nodes_of
from trainyard.planning.comparison.run_diff import diff_jobs
from trainyard.planning.nodes.affinity import selects, shown_terms
from trainyard.planning.nodes.placement import WEIGHTS
from trainyard.planning.objects import run_objects
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.platform import Platform, PlatformQueue
from trainyard.rules.check import check
from trainyard.run_file.load import load_run
from trainyard.run_file.models import POOL_LIMIT, RunConfig

Object = dict[str, Any]
DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
PLATFORM = platform_with_spot()
BOTH = "[spot, on-demand]"
SPOT_LABELS = {"machine": "p5", "capacity": "spot"}


def digits(pool: str | None, gpus: str = "16") -> RunConfig:
    return load_run(DIGITS, [f"resources.pool={pool}"] if pool else [], gpus=gpus)


def job_of(pool: str | None, platform: Platform = PLATFORM) -> Object:
    job: Object = run_objects(digits(pool), platform, "team").job
    return job


def workers_of(job: Object) -> Object:
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    spec: Object = group["template"]["spec"]
    return spec


def refusal(pool: str, platform: Platform = PLATFORM) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_run(digits(pool), platform, "team")
    return str(raised.value)


def test_workers_may_use_the_nodes_of_each_pool_and_prefer_the_first() -> None:
    job = job_of(BOTH)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"]) == ("spot", 2)
    spec = workers_of(job)
    on_spot = {"matchExpressions": [MACHINE, ON_SPOT]}
    assert "nodeSelector" not in spec
    assert spec["affinity"]["nodeAffinity"] == {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [on_spot, {"matchExpressions": [MACHINE, OFF_SPOT]}]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": on_spot}],
    }
    assert spec["tolerations"] == [GPU_TAINT, SPOT_TAINT]


def test_apart_from_their_nodes_the_pods_are_those_of_either_pool() -> None:
    several, one = (copy.deepcopy(workers_of(job_of(pool))) for pool in (BOTH, "on-demand"))
    for spec in (several, one):
        for key in ("nodeSelector", "affinity", "tolerations"):
            spec.pop(key, None)
    assert several == one


def test_the_order_of_the_list_is_the_order_of_preference() -> None:
    preferred = workers_of(job_of("[on-demand, spot]"))["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert preferred == [{"weight": 100, "preference": {"matchExpressions": [MACHINE, OFF_SPOT]}}]


def test_a_node_of_an_earlier_pool_outweighs_all_later_ones() -> None:
    assert len(WEIGHTS) == POOL_LIMIT - 1
    for number, weight in enumerate(WEIGHTS):
        assert weight > sum(WEIGHTS[number + 1 :])


def test_a_list_of_one_pool_is_that_pool() -> None:
    assert digits("[spot]") == digits("spot")
    assert job_of("[spot]") == job_of("spot")


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("[spot, spot]", "resources.pool = ['spot', 'spot']: must name each pool once: spot"),
        ("[]", "resources.pool = []: "),
        ("3", "resources.pool = 3: must be text"),
        ("[spot, 3]", "resources.pool.1 = 3: must be text"),
        ("{a: b}", "resources.pool = {'a': 'b'}: "),
    ],
)
def test_what_is_no_list_of_pools_is_refused_when_it_is_read(pool: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        digits(pool)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"memory_gib": 640}, "memoryGib is 640 in pool spot and 480 in pool on-demand"),
        ({"gpus_per_node": 4}, "gpusPerNode is 4 in pool spot and 8 in pool on-demand"),
        ({"runtimeClassName": "gvisor"}, "runtimeClassName is gvisor in pool spot and not set in"),
        ({"nodeSelector": {}}, "pool spot has no node selector"),
    ],
)
def test_pools_of_a_list_differ_in_their_nodes_alone(changed: Object, words: str) -> None:
    said = refusal(BOTH, platform_with_spot(**changed))
    assert "resources.pool = [spot, on-demand]: " in said
    assert words in said


def test_each_pool_of_a_list_must_exist_and_have_what_the_run_asks_for() -> None:
    assert "'none' is no pool of the platform" in refusal("[spot, none]")
    assert "pool cpu has no GPUs" in refusal("[spot, cpu]")


@pytest.mark.parametrize(
    ("queue", "chooses"),
    [
        (PlatformQueue(), "the scheduler chooses one for each pod, and prefers spot"),
        (PlatformQueue(system="kueue", name="team"), "Kueue chooses one for all workers"),
    ],
)
def test_the_plan_says_which_pools_and_what_chooses(queue: PlatformQueue, chooses: str) -> None:
    platform = PLATFORM.model_copy(update={"queue": queue})
    run = digits(BOTH)
    rows = {row.name: row for row in explain_plan(plan_run(run, platform, "team"), run, platform)}
    assert rows["pool"].value == "spot or on-demand"
    assert chooses in rows["pool"].why
    assert rows["placement on spot"].value == "machine=p5, capacity=spot"
    assert rows["placement on on-demand"].value == "machine=p5, capacity not spot"


def node(name: str, **labels: str) -> Object:
    amounts = {"cpu": "96", "memory": "600Gi", "nvidia.com/gpu": "8", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def test_the_capacity_for_a_run_is_that_of_all_its_pools() -> None:
    nodes = nodes_of(
        [node("a", **SPOT_LABELS), node("b", machine="p5"), node("c", machine="m5")], []
    )
    values = {
        pool: capacity_rows(fit_groups(job_of(pool), nodes))[0].value
        for pool in (BOTH, "spot", "on-demand")
    }
    assert values == {BOTH: "2 of 2 pods", "spot": "1 of 2 pods", "on-demand": "1 of 2 pods"}


def test_gpus_are_counted_for_the_pool_whose_pods_may_use_them() -> None:
    nodes = nodes_of([node("a", **SPOT_LABELS), node("b", machine="p5")], [])
    pools = {
        name: ("nvidia.com/gpu", PLATFORM.worker_group(name)["template"]["spec"])
        for name in ("spot", "on-demand")
    }
    found = {one.node: one.pools for one in gpu_nodes(nodes, pools)}
    assert found == {"a": ("spot",), "b": ("on-demand",)}


def test_heads_may_not_use_spot_nodes() -> None:
    spec = job_of(BOTH)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    nodes = nodes_of([node("a", **SPOT_LABELS), node("b")], [])
    assert [accepts(one, spec) for one in nodes] == [False, True]


def test_another_list_changes_the_pods_and_not_what_is_trained() -> None:
    changes = diff_jobs(job_of("on-demand"), job_of(BOTH), live=False)
    assert changes
    assert {change.effect for change in changes} == {"next attempt"}


def test_the_rayjob_breaks_no_rule() -> None:
    assert "&" not in yaml_text(job_of(BOTH))
    found = check(job_of(BOTH), PLATFORM.kuberay, PLATFORM.ray_version)
    assert [one for one in found if one.severity == "error"] == []


@pytest.mark.parametrize(
    ("requirement", "labels", "met"),
    [
        ({"operator": "In", "values": ["a", "b"]}, {"k": "b"}, True),
        ({"operator": "In", "values": ["a"]}, {}, False),
        ({"operator": "NotIn", "values": ["a"]}, {}, True),
        ({"operator": "NotIn", "values": ["a"]}, {"k": "a"}, False),
        ({"operator": "Exists"}, {"k": ""}, True),
        ({"operator": "DoesNotExist"}, {"k": ""}, False),
        ({"operator": "Gt", "values": ["8"]}, {"k": "9"}, True),
        ({"operator": "Lt", "values": ["8"]}, {"k": "9"}, False),
        ({"operator": "Gt", "values": ["8"]}, {"k": "many"}, False),
    ],
)
def test_node_affinity_is_read_as_the_scheduler_reads_it(
    requirement: Object, labels: dict[str, str], met: bool
) -> None:
    terms = [{"matchExpressions": [{"key": "k", **requirement}]}]
    assert selects(required(terms), "a", labels) is met
    never = {"matchExpressions": [{"key": "other", "operator": "Exists"}]}
    assert selects(required([never, *terms]), "a", labels) is met


def test_node_affinity_may_name_a_node() -> None:
    fields = [{"key": "metadata.name", "operator": "In", "values": ["a"]}]
    spec = required([{"matchFields": fields}])
    assert [selects(spec, name, {}) for name in "ab"] == [True, False]


def test_an_operator_that_kubernetes_does_not_have_is_named() -> None:
    spec = required([{"matchExpressions": [{"key": "k", "operator": "in", "values": ["a"]}]}])
    with pytest.raises(ConfigError, match="operator 'in'"):
        selects(spec, "a", {})


def test_what_a_pod_selects_is_shown_in_one_line() -> None:
    terms = [
        {
            "matchExpressions": [
                {"key": "zone", "operator": "In", "values": ["a", "b"]},
                {"key": "cores", "operator": "Gt", "values": ["8"]},
            ]
        },
        {"matchExpressions": [{"key": "fast", "operator": "Exists"}]},
    ]
    spec = {"nodeSelector": {"gpu": "a100"}, **required(terms)}
    assert shown_terms(spec) == "gpu=a100, zone in (a, b), cores Gt 8 or gpu=a100, fast Exists"
    assert shown_terms({}) == ""


def required(terms: list[Object]) -> Object:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}
