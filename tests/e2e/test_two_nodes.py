"""Two real nodes: a run spans both, goes on without one that is lost, and in spite of one that is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import (
    CLUSTER_HOME,
    Object,
    Team,
    cluster_py,
    get,
    kubectl,
    require_test_cluster,
    wait_for,
)
from drilling import check, check_nothing_is_left, keep, strike

from launcher.drill.scenarios import HEAD_S, Scenario
from launcher.drill.strikes import Target, kill_driver

pytestmark = pytest.mark.drills

PREFERRED = "trainyard.io/e2e-last=resort:PreferNoSchedule"
LONG = ("examples/digits.yaml", "--workers", "2", "--name", "spread", "--detach")
SETTINGS = ("train.model.image_size=16", "train.epochs=40", "checkpoint.every_s=5")


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


def nodes_of(team: Team, node_type: str) -> list[str]:
    pods = team.pods(cluster=cluster_of(team), node_type=node_type)
    return [pod["spec"].get("nodeName", "") for pod in pods if is_running(pod)]


def cluster_of(team: Team) -> str:
    (job,) = team.rayjobs()
    name: str = job["status"].get("rayClusterName", "")
    return name


def is_running(pod: Object) -> bool:
    running: bool = pod["status"]["phase"] == "Running"
    return running


def progress_of(team: Team) -> Object:
    progress: Object | None = team.status("spread")["submissions"][-1]["progress"]
    return progress or {"step": 0, "epoch": 0}


def test_a_run_goes_on_when_the_node_of_its_workers_is_lost(team: Team, second_node: str) -> None:
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    submitted = team.trainyard("submit", *LONG, *options)
    assert submitted.returncode == 0, submitted.stderr
    wait_for("some epochs are trained", lambda: progress_of(team)["epoch"] > 3)
    assert nodes_of(team, "head") == ["node-1"]
    assert nodes_of(team, "worker") == [second_node, second_node]
    # What the head on one node reads was written by a worker on the other.
    before = progress_of(team)["step"]

    cluster_py("lose-node")
    wait_for("it is noticed", lambda: not is_ready(second_node))
    kubectl("delete", "node", second_node)  # as a cloud's controller does
    watched = team.trainyard("watch", "spread")
    assert watched.returncode == 0, watched.stderr
    summary = team.status("spread")["summary"]
    assert (summary["outcome"], summary["epochs"]) == ("succeeded", 40)
    assert summary["resumed_from"] is not None
    assert summary["steps"] > before
    assert nodes_of(team, "worker") in ([], ["node-1", "node-1"])


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
    node = worker["spec"]["nodeName"]
    assert node != head["spec"]["nodeName"]
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
