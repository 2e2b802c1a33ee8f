"""Two real nodes: a run spans both, goes on without one that is lost, and in spite of one that is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import (
    CLUSTER_HOME,
    Team,
    cluster_py,
    get,
    kubectl,
    require_test_cluster,
    wait_for,
)
from drilling import check, check_nothing_is_left, keep, strike

from launcher.drill.scenarios import HEAD_S, WORKER_S, Scenario
from launcher.drill.strikes import Target, kill_driver

pytestmark = pytest.mark.drills

PREFERRED = "trainyard.io/e2e-last=resort:PreferNoSchedule"


@pytest.fixture(scope="module")
def second_node() -> Iterator[str]:
    """Workers prefer it to the first one."""
    require_test_cluster("only it has a node that can be lost")
    cluster_py("nodes", "2")
    kubectl("taint", "node", "node-1", PREFERRED, "--overwrite")
    yield "node-2"
    kubectl("taint", "node", "node-1", f"{PREFERRED}-")
    cluster_py("nodes", "1")


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory, second_node: str
) -> Team:
    team = make_team("two-nodes")
    on_first = {"kubernetes.io/hostname": "node-1"}
    team.install(tmp_path_factory.mktemp("values"), head__nodeSelector=on_first)
    return team


def node_of(target: Target, pod: str) -> str:
    name: str = get("pod", target.cluster.namespace, pod)["spec"]["nodeName"]
    return name


def lose_node(target: Target) -> None:
    """Kubelet and containers of the workers' node end; noticed, its Node goes as by a cloud's controller."""
    (node,) = {node_of(target, worker.pod) for worker in target.workers}
    assert node != node_of(target, target.head)
    cluster_py("lose-node")
    wait_for("it is noticed", lambda: not is_ready(node))
    kubectl("delete", "node", node)


def test_a_run_survives_the_loss_of_the_node_with_all_its_workers(
    team: Team, tmp_path: Path
) -> None:
    scenario = Scenario(
        name="node-lost",
        fault="the node of all workers is lost, and then its Node object deleted",
        answer="other pods are made where there is a node, once Kubernetes has given up those of before",
        actor="KubeRay, Ray Train",
        rights="the machine",
        strike=lose_node,
        within_s=WORKER_S,
    )
    result = strike(team, scenario, tmp_path).to_json()
    keep(result, scenario)
    check(result, scenario)
    check_nothing_is_left(team)


def test_a_node_that_comes_back_is_used_again(second_node: str) -> None:
    cluster_py("nodes", "2")
    assert is_ready(second_node)


OVERTAKEN = "attempt 2 has taken over"
LOGS = "node-2/live/kubelet/pods/{pod}/volumes/kubernetes.io~empty-dir/tmp/ray/session_*/logs/**/*worker*"


def cut_off(target: Target) -> None:
    """The worker's node hears of nothing any more, and works on; then the driver is killed.

    Its pod cannot be ended: only what lies in the run's folder tells the worker that it is overtaken.
    """
    namespace = target.cluster.namespace
    worker, head = (get("pod", namespace, pod) for pod in (target.workers[0].pod, target.head))
    node = node_of(target, target.workers[0].pod)
    assert node != node_of(target, target.head)
    kubectl("cordon", node)
    cluster_py("stop", "kubelet-2")
    try:
        cluster_py("cut", worker["status"]["podIP"], head["status"]["podIP"])
        kill_driver(target)
        said = wait_for("the worker hears of it", lambda: said_in(worker["metadata"]["uid"]))
        target.say(f"the worker that was cut off: {said}")
    finally:
        cluster_py("start", "kubelet-2")
        kubectl("uncordon", node)


def said_in(pod: str) -> str:
    """What a worker in a pod of the second node has said of being overtaken."""
    for log in filter(Path.is_file, CLUSTER_HOME.glob(LOGS.format(pod=pod))):
        said = [line for line in log.read_text(errors="replace").splitlines() if OVERTAKEN in line]
        if said:
            return said[0].strip()
    return ""


def test_a_straggler_that_nobody_can_reach_spoils_nothing(team: Team, tmp_path: Path) -> None:
    scenario = Scenario(
        name="straggler",
        fault="a worker is cut off with its node and works on, while its attempt fails",
        answer="the next attempt takes over; what the straggler still saves is not used, and it ends",
        actor="KubeRay, trainer",
        rights="the machine",
        strike=cut_off,
        within_s=HEAD_S,
        settings=("resources.workers=1", "train.epochs=60"),
    )
    result = strike(team, scenario, tmp_path).to_json()
    keep(result, scenario)
    check(result, scenario)
    check_nothing_is_left(team)
    assert result["attempts"] == 2


def is_ready(node: str) -> bool:
    conditions = get("node", "default", node)["status"]["conditions"]
    return {one["type"]: one["status"] for one in conditions}["Ready"] == "True"
