"""The real scheduler places the pods of runs on spot nodes, in several pools, in racks and zones.

The nodes do not exist. They have the labels and taints that clouds and clusters give to theirs:

| nodes | machine | capacity | zone | rack |
|---|---|---|---|---|
| 0 | | on-demand | a | |
| 1, 2 | p5 | spot | a | 1 |
| 3, 4 | p5 | on-demand | a | 2 |
| 5, 6 | p5 | on-demand | b | 3 |
| 7, 8 | p5 | on-demand | b | 4 |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from conftest import Object, Team, get, set_options, wait_for
from made_up_nodes import (
    MADE_UP_HEAD,
    RACK,
    TAINT,
    MadeUpNode,
    Placed,
    change_node,
    free_all_nodes,
    made_up_nodes,
    p5_pool,
    placed,
)

ZONE = "topology.kubernetes.io/zone"
SPOT = {"capacity": "spot"}
SPOT_TAINT: Object = {"key": "capacity", "value": "spot", "effect": "NoSchedule"}
SPOT_VALUES = {
    "nodeSelector": SPOT,
    "tolerations": [{"key": "capacity", "operator": "Equal", "value": "spot"}],
}


def p5(zone: str, rack: int, capacity: str = "on-demand") -> MadeUpNode:
    labels = {"machine": "p5", "capacity": capacity, ZONE: zone, RACK: f"{rack}"}
    return MadeUpNode(labels=labels)


NODES = (
    MadeUpNode(labels={"capacity": "on-demand", ZONE: "a"}),
    *(p5("a", 1, "spot"),) * 2,
    *(p5("a", 2),) * 2,
    *(p5("b", 3),) * 2,
    *(p5("b", 4),) * 2,
)
ON_SPOT = {"made-up-1", "made-up-2"}
ON_DEMAND = {f"made-up-{number}" for number in range(len(NODES))} - ON_SPOT
RACK_OF = {f"made-up-{number}": node.labels.get(RACK) for number, node in enumerate(NODES)}
ZONE_OF = {f"made-up-{number}": node.labels[ZONE] for number, node in enumerate(NODES)}


EVEN_ZONES: Object = {
    "maxSkew": 1,
    "topologyKey": ZONE,
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"ray.io/node-type": "worker"}},
    "matchLabelKeys": ["ray.io/cluster"],
}
POOLS = {
    "p5": p5_pool(8),
    "p5-spot": p5_pool(8, spot=True),
    "half": p5_pool(4),
    "packed": p5_pool(4, topologyKey=RACK),
    "even": p5_pool(4, pod={"topologySpreadConstraints": [EVEN_ZONES]}),
}
BOTH = "[p5-spot, p5]"


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    """A team whose pools are made of nodes that do not exist."""
    with made_up_nodes(*NODES):
        team = make_team("placed")
        team.install(
            tmp_path_factory.mktemp("values"),
            spot=SPOT_VALUES,
            **MADE_UP_HEAD,
            **{f"pools__{name}": values for name, values in POOLS.items()},
        )
        yield team
        free_all_nodes(team)


@pytest.fixture(autouse=True)
def all_nodes(team: Team) -> Iterator[None]:
    """Each test ends with all nodes as they were, and free."""
    yield
    free_all_nodes(team)
    for name, node in zip(sorted(ON_SPOT | ON_DEMAND), NODES, strict=True):
        change_node(name, metadata={"labels": node.labels}, spec={"taints": [TAINT]})
        change_node(name, spec={"unschedulable": None})


def options(pools: str, gpus: int) -> list[str]:
    """The run file and its size. All numbers of GPUs in this file divide the batch."""
    settings = (f"resources.pool={pools}", "train.global_batch_size=192")
    return ["examples/digits.yaml", "--gpus", f"{gpus}", *set_options(settings)]


def submit(team: Team, name: str, pools: str, gpus: int) -> None:
    """Submit a run and return at once."""
    ended = team.trainyard("submit", *options(pools, gpus), "--name", name, "--detach")
    assert ended.returncode == 0, ended.stderr


def run_on(team: Team, name: str, pools: str, gpus: int, workers: int) -> Placed:
    """Submit a run and return the nodes of its pods."""
    submit(team, name, pools, gpus)
    return placed(team, name, workers)


def cordon(nodes: Sequence[str] | set[str]) -> None:
    for node in nodes:
        change_node(node, spec={"unschedulable": True})


@pytest.mark.parametrize("taints", [(), (SPOT_TAINT,)], ids=["as on EKS and GKE", "as on AKS"])
def test_workers_of_a_spot_pool_run_on_spot_nodes_and_the_head_on_demand(
    team: Team, taints: Sequence[Object]
) -> None:
    for node in ON_SPOT:
        change_node(node, spec={"taints": [TAINT, *taints]})
    # The only free node for the head is then a spot node, and it waits instead.
    cordon(ON_DEMAND)
    submit(team, "on-spot", "p5-spot", 16)
    wait_for("the workers have the spot nodes", lambda: worker_nodes(team) == ON_SPOT, 60)
    refused = wait_for("the scheduler says why the head waits", lambda: refusals(team), 60)
    assert "didn't match Pod's node affinity" in refused
    for node in ON_DEMAND:
        change_node(node, spec={"unschedulable": None})
    assert placed(team, "on-spot", 2).head in ON_DEMAND


def worker_nodes(team: Team) -> set[str | None]:
    """Return the nodes of the workers of all runs."""
    return {pod["spec"].get("nodeName") for pod in team.pods(node_type="worker")}


def refusals(team: Team) -> str:
    """Return why the scheduler has found no node for the head."""
    (head,) = team.pods(node_type="head")
    selector = f"reason=FailedScheduling,involvedObject.name={head['metadata']['name']}"
    events = get("events", team.namespace, "--field-selector", selector)["items"]
    return " ".join(event["message"] for event in events)


def test_a_pool_without_spot_never_uses_spot_nodes(team: Team) -> None:
    found = run_on(team, "steady", "p5", 48, 6)
    assert set(found.workers) == ON_DEMAND - {"made-up-0"}
    submit(team, "waits", "p5", 8)
    wait_for(
        "explain names the GPUs that are short",
        lambda: "nvidia.com/gpu" in team.trainyard("explain", "waits").stdout,
        90,
    )
    assert worker_nodes(team) == {*found.workers, None}


def test_a_list_of_pools_uses_the_first_while_it_has_room_and_then_the_second(team: Team) -> None:
    assert set(run_on(team, "first", BOTH, 16, 2).workers) == ON_SPOT
    second = run_on(team, "second", BOTH, 16, 2)
    assert set(second.workers) < ON_DEMAND
    assert len(set(second.workers)) == 2


def test_the_workers_that_the_first_pool_has_no_room_for_use_the_second(team: Team) -> None:
    cordon({"made-up-1"})
    found = run_on(team, "divided", BOTH, 24, 3)
    assert set(found.workers) & ON_SPOT == {"made-up-2"}
    assert len(set(found.workers) & ON_DEMAND) == 2


def test_the_second_pool_is_used_where_no_node_of_the_first_exists(team: Team) -> None:
    for node in ON_SPOT:
        change_node(node, metadata={"labels": {"machine": None, "capacity": None}})
    assert set(run_on(team, "missing", BOTH, 16, 2).workers) < ON_DEMAND


def test_the_order_of_the_list_is_the_order_in_which_the_scheduler_fills_pools(team: Team) -> None:
    assert set(run_on(team, "steady", "[p5, p5-spot]", 48, 6).workers) < ON_DEMAND
    assert set(run_on(team, "rest", "[p5, p5-spot]", 16, 2).workers) == ON_SPOT


def racks(found: Placed) -> Counter[str | None]:
    """Return the number of workers in each rack."""
    return Counter(RACK_OF[node] for node in found.workers)


def test_workers_are_packed_in_one_rack_and_without_a_label_they_are_not(team: Team) -> None:
    loose = racks(run_on(team, "loose", "half", 16, 4))
    assert len(loose) > 1
    free_all_nodes(team)
    assert sorted(racks(run_on(team, "packed", "packed", 16, 4)).values()) == [4]


def test_runs_are_packed_each_for_itself(team: Team) -> None:
    """Three runs of half a rack each: the workers of another run attract none."""
    for name in ("one", "two", "three"):
        assert sorted(racks(run_on(team, name, "packed", 8, 2)).values()) == [2]


def test_a_run_that_has_room_in_no_rack_is_distributed_over_several(team: Team) -> None:
    found = racks(run_on(team, "large", "packed", 24, 6))
    assert sorted(found.values()) == [2, 4]


def test_a_spread_constraint_of_a_pool_divides_the_workers_between_zones(team: Team) -> None:
    found = run_on(team, "even", "even", 32, 8)
    assert Counter(ZONE_OF[node] for node in found.workers) == {"a": 4, "b": 4}


def test_the_plan_counts_the_nodes_of_all_pools_of_a_list(team: Team) -> None:
    planned = team.trainyard("plan", *options(BOTH, 64), "--from-cluster", "--json")
    assert planned.returncode == 0, planned.stderr
    rows = {row["name"]: row for row in json.loads(planned.stdout)}
    assert rows["free now: p5-spot"]["value"] == "8 of 8 pods"
    assert "8 nodes may run these pods" in rows["free now: p5-spot"]["why"]
