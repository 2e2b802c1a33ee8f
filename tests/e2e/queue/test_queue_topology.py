"""Kueue packs the workers of runs in racks, by its Topology Aware Scheduling.

The nodes do not exist: two racks of two nodes, with room for two pods of workers each, and a node for heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from conftest import Object, Team, set_options
from made_up_nodes import (
    MADE_UP_HEAD,
    RACK,
    MadeUpNode,
    free_all_nodes,
    made_up_nodes,
    p5_pool,
    placed,
)
from queued_runs import await_message, await_phase, done, workloads

NODES = (MadeUpNode(labels={}), *(MadeUpNode(labels={"machine": "p5", RACK: r}) for r in "1122"))
RACK_OF = {f"made-up-{number}": node.labels.get(RACK) for number, node in enumerate(NODES)}
POOL = p5_pool(4, topologyKey=RACK)
QUEUE = {
    "system": "kueue",
    "name": "racks",
    "kueue": {"clusterQueue": "e2e-topology", "nodes": {"packed": 8}, "runs": 4},
}
TOO_LARGE_FOR_A_RACK = 6


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    with made_up_nodes(*NODES):
        team = make_team("topology")
        team.install(
            tmp_path_factory.mktemp("values"),
            queue=QUEUE,
            **MADE_UP_HEAD,
            pools__packed=POOL,
            pools__strict={**POOL, "topologyMode": "required"},
        )
        yield team
        free_all_nodes(team)


@pytest.fixture(autouse=True)
def all_nodes(team: Team) -> Iterator[None]:
    """Each test ends with all nodes free."""
    yield
    free_all_nodes(team)


def submit(team: Team, name: str, pods: int, pool: str = "packed", mode: str | None = None) -> None:
    """Submit a run of as many pods of workers, with 4 GPUs each."""
    settings = [f"resources.pool={pool}", "train.global_batch_size=192"]
    if mode is not None:
        settings.append(f"resources.topology_mode={mode}")
    run = ("examples/digits.yaml", "--gpus", f"{4 * pods}", "--name", name, "--detach")
    done(team, "submit", *run, *set_options(settings))


def racks(team: Team, name: str, pods: int) -> list[int]:
    """Wait until the pods of a run have nodes, and return the number of pods in each rack."""
    return sorted(Counter(RACK_OF[node] for node in placed(team, name, pods).workers).values())


@pytest.mark.parametrize(
    ("pool", "mode", "topology"),
    [
        ("packed", None, {"preferred": RACK}),
        ("packed", "required", {"required": RACK}),
        ("packed", "unconstrained", {"unconstrained": True}),
        ("strict", None, {"required": RACK}),
        ("strict", "preferred", {"preferred": RACK}),
    ],
)
def test_workers_share_a_rack_as_the_pool_or_the_run_asks(
    team: Team, pool: str, mode: str | None, topology: Object
) -> None:
    submit(team, "packed", 4, pool, mode)
    assert mode == "unconstrained" or racks(team, "packed", 4) == [4]
    (found,) = workloads(team, "packed")
    (asked,) = (
        each["topologyRequest"] for each in found["spec"]["podSets"] if "topologyRequest" in each
    )
    assert topology.items() <= asked.items()


def test_runs_are_packed_each_for_itself_and_the_next_one_waits(team: Team) -> None:
    for name in ("one", "two"):
        submit(team, name, 4, mode="required")
        assert racks(team, name, 4) == [4]
    submit(team, "three", 2, mode="required")
    await_phase(team, "three", "queued")


def test_a_run_that_requires_one_rack_waits_while_others_are_distributed(team: Team) -> None:
    submit(team, "strict", TOO_LARGE_FOR_A_RACK, "strict")
    await_message(team, "strict", "topology")
    assert "kueue-domain-too-small" in done(team, "explain", "strict")
    submit(team, "loose", TOO_LARGE_FOR_A_RACK)
    assert racks(team, "loose", TOO_LARGE_FOR_A_RACK) == [2, 4]
