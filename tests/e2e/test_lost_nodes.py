"""Several real nodes: a run uses all, and continues if one is lost or unreachable."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bucket import Bucket, in_bucket
from conftest import (
    CLUSTER_HOME,
    Team,
    cluster_py,
    get,
    kubectl,
    require_test_cluster,
    wait_for,
)
from drilling import EARLY, drill, process_of, volume_of

from trainyard.drills.scenarios import HEAD_S, WORKER_S, Scenario
from trainyard.drills.strikes import Target, kill_driver

pytestmark = pytest.mark.drills

TeamWith = Callable[..., Team]

ON_FIRST = {"kubernetes.io/hostname": "node-1"}
DRAIN_LIMIT = "240s"
GIVEN_UP_S = 90.0
"""The time in seconds until Kubernetes removes the pods of a lost node whose Node object is deleted."""
PREFERRED = "trainyard.io/e2e-last=resort:PreferNoSchedule"


@pytest.fixture(scope="module")
def second_node() -> Iterator[str]:
    """The second node, which workers prefer to the first one."""
    require_test_cluster("only it has a node that can be lost")
    cluster_py("nodes", "2")
    kubectl("taint", "node", "node-1", PREFERRED, "--overwrite")
    yield "node-2"
    kubectl("taint", "node", "node-1", f"{PREFERRED}-")
    cluster_py("nodes", "1")


@pytest.fixture(scope="module")
def team_with(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory, second_node: str
) -> TeamWith:
    """A function that creates a team with a given name and values of its platform."""

    def team_with(name: str, **values: Any) -> Team:
        team = make_team(name)
        team.install(tmp_path_factory.mktemp("values"), **values)
        return team

    return team_with


@pytest.fixture(scope="module")
def team(team_with: TeamWith) -> Team:
    return team_with("lost-nodes", head__nodeSelector=ON_FIRST)


@pytest.fixture(scope="module")
def bucket_team(
    make_team: Callable[[str], Team],
    bucket: Bucket,
    tmp_path_factory: pytest.TempPathFactory,
    second_node: str,
) -> Team:
    team = make_team("lost-nodes-s3")
    bucket.give_to(team, tmp_path_factory.mktemp("values"), head__nodeSelector=ON_FIRST)
    return team


def node_of(target: Target, pod: str) -> str:
    name: str = get("pod", target.cluster.namespace, pod)["spec"]["nodeName"]
    return name


def lose_node(
    target: Target, node: str = "node-2", *, workers: int = 2, has_head: bool = False
) -> None:
    """Stop the kubelet and all containers of a node. Delete its Node, as a cloud controller does."""
    assert [node_of(target, worker.pod) for worker in target.workers].count(node) == workers
    assert (node_of(target, target.head) == node) == has_head
    cluster_py("lose-node", node)
    wait_for("it is noticed", lambda: not is_ready(node))
    kubectl("delete", "node", node)


def test_a_run_survives_the_loss_of_the_node_with_all_its_workers(
    team_with: TeamWith, tmp_path: Path
) -> None:
    team = team_with("lost-nodes-apart", head__nodeSelector=ON_FIRST, job__separateAttempts=True)
    scenario = Scenario(
        name="node-lost",
        fault="the node of all workers is lost, and then its Node object deleted",
        answer="after `faults.replacement_timeout_s` (here 5 s, as `job.separateAttempts` allows) "
        "another attempt starts on a new cluster, which avoids the lost node",
        actor="trainer, KubeRay",
        rights="the machine",
        strike=lose_node,
        within_s=WORKER_S,
        settings=("faults.replacement_timeout_s=5",),
    )
    assert drill(team, scenario, tmp_path)["attempts"] == 2


def test_a_run_that_waits_gets_the_place_of_a_lost_node_within_the_same_attempt(
    team: Team, tmp_path: Path
) -> None:
    cluster_py("nodes", "2")
    scenario = Scenario(
        name="node-replaced",
        fault="the node of all workers is lost, and then its Node object deleted; the run waits for longer "
        "(the default)",
        answer="new pods are created where there is a node, once Kubernetes has given up the old "
        "ones: it notices the loss after 50 s, and waits for another 40 s",
        actor="KubeRay, Ray Train",
        rights="the machine",
        strike=lose_node,
        within_s=WORKER_S,
        lasts_s=GIVEN_UP_S,
    )
    assert drill(team, scenario, tmp_path)["attempts"] == 1


def lose_node_for_good(target: Target, storage: Path) -> None:
    """Stop the second node as `lose_node` does, but delete its Node only after the run trains again."""
    folder = storage / target.run
    attempt = last_attempt(folder)
    cluster_py("lose-node", "node-2")
    try:
        wait_for("the next attempt trains", lambda: last_attempt(folder) > attempt)
    finally:
        kubectl("delete", "node", "node-2")


def test_a_run_does_not_wait_for_a_lost_node_that_nobody_deletes(
    team: Team, tmp_path: Path
) -> None:
    cluster_py("nodes", "2")
    scenario = Scenario(
        name="node-silent",
        fault="the node of all workers is lost, and nobody deletes its Node object",
        answer="KubeRay waits for the pods there; after `faults.replacement_timeout_s` (here 50 s) another "
        "attempt starts on a new cluster",
        actor="trainer, KubeRay",
        rights="the machine",
        strike=lambda target: lose_node_for_good(target, volume_of(target.cluster.namespace)),
        within_s=HEAD_S,
        settings=("faults.replacement_timeout_s=50",),
    )
    assert drill(team, scenario, tmp_path)["attempts"] == 2


def test_a_run_survives_the_loss_of_the_node_with_all_its_pods(
    team_with: TeamWith, tmp_path: Path
) -> None:
    cluster_py("nodes", "2")
    team = team_with("lost-nodes-head")
    scenario = Scenario(
        name="head-node-lost",
        fault="the node of the head and of all workers is lost, and then its Node object deleted",
        answer="a new head and new workers are created where there is a node, once Kubernetes has "
        "given up the old ones, and the job starts there again",
        actor="KubeRay, trainer",
        rights="the machine",
        strike=partial(lose_node, has_head=True),
        within_s=HEAD_S,
    )
    drill(team, scenario, tmp_path)


def test_an_elastic_run_waits_for_nobody_when_it_loses_a_node(
    team_with: TeamWith, tmp_path: Path
) -> None:
    cluster_py("nodes", "2")
    # Two workers of this size do not fit on one node.
    team = team_with("lost-nodes-elastic", head__nodeSelector=ON_FIRST, pools__cpu__memoryGib=13)
    scenario = Scenario(
        name="node-lost-elastic",
        fault="an elastic run (`workers: {min: 1, max: 2}`) loses the node of one of its workers",
        answer="it goes on with the other one; when Kubernetes has given up the lost pod, a new "
        "one is created where there is a node, and joins",
        actor="Ray Train, Ray's autoscaler",
        rights="the machine",
        strike=partial(lose_node, workers=1),
        within_s=WORKER_S,
        settings=("resources.workers={min: 1, max: 2}", "train.epochs=60"),
    )
    drill(team, scenario, tmp_path, EARLY)


def lose_a_worker(target: Target) -> None:
    """Lose the node of a worker, but not that of the head."""
    nodes = [node_of(target, worker.pod) for worker in target.workers]
    lost = next(node for node in nodes if node != node_of(target, target.head))
    lose_node(target, lost, workers=1)


@pytest.fixture
def third_node(second_node: str) -> Iterator[None]:
    cluster_py("nodes", "3")
    yield
    cluster_py("nodes", "2")


def test_a_run_with_a_spare_pod_loses_a_node_and_no_step(
    team_with: TeamWith, third_node: None, tmp_path: Path
) -> None:
    # Two workers of this size do not fit on one node: each node has a worker, or the spare pod.
    team = team_with("lost-nodes-spare", head__nodeSelector=ON_FIRST, pools__cpu__memoryGib=13)
    scenario = Scenario(
        name="node-lost-spare",
        fault="the node of a worker is lost, and then its Node object deleted; DDP with "
        "`faults.replace_workers` and `faults.spares: 1`",
        answer="once Ray has given up the node, a process in the spare pod takes the place of the lost "
        "worker, and the other one keeps its state",
        actor="Ray Train, trainer",
        rights="the machine",
        strike=lose_a_worker,
        within_s=WORKER_S,
        steps_lost=0,
        restarts="one",
        settings=("faults.replace_workers=true", "faults.spares=1"),
    )
    assert drill(team, scenario, tmp_path)["attempts"] == 1


def test_a_node_that_comes_back_is_used_again(second_node: str, image: str) -> None:
    cluster_py("nodes", "2")
    there = json.dumps({"spec": {"nodeSelector": {"kubernetes.io/hostname": second_node}}})
    options = ("--image", image, "--restart=Never", f"--overrides={there}", "--command")
    kubectl("run", "back", "-n", "default", *options, "--", "true")
    wait_for("a pod has run there", lambda: phase_of("back") == "Succeeded")
    kubectl("delete", "pod", "back", "-n", "default")


def phase_of(pod: str) -> str:
    phase: str = get("pod", "default", pod)["status"]["phase"]
    return phase


def drain(target: Target) -> None:
    """Drain a node for maintenance, and uncordon it afterwards."""
    (node,) = {node_of(target, worker.pod) for worker in target.workers}
    assert node != node_of(target, target.head)
    try:
        limit = f"--timeout={DRAIN_LIMIT}"
        kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", limit)
    finally:
        kubectl("uncordon", node)


def test_a_run_leaves_a_node_that_is_drained_and_trains_on_another(
    team: Team, tmp_path: Path
) -> None:
    scenario = Scenario(
        name="kubectl-drain",
        fault="the node of all workers is drained (`kubectl drain`), the node of the head is not",
        answer="the workers save and leave; new pods are created on another node",
        actor="KubeRay, trainer",
        rights="patch nodes, create pods/eviction",
        strike=drain,
        within_s=WORKER_S,
        has_notice=True,
        settings=("train.epochs=80",),
    )
    drill(team, scenario, tmp_path)


LOGS = "node-2/live/kubelet/pods/{pod}/volumes/kubernetes.io~empty-dir/tmp/ray/session_*/logs/train/*app*"
LEFT = "Error in training function"
MANIFEST = "manifest.json"


def strand(storage: Path, target: Target) -> None:
    """Stop a worker during a save, cut off its node, and continue the worker after the next attempt has
    started.

    Its pod cannot be deleted, so the worker learns only from the run's folder that its attempt is fenced.
    """
    namespace = target.cluster.namespace
    worker, head = (get("pod", namespace, pod) for pod in (target.workers[0].pod, target.head))
    node = node_of(target, target.workers[0].pod)
    assert node != node_of(target, target.head)
    process = process_of(f"/{node}/", target.processes[0])
    folder = storage / target.run
    attempt = last_attempt(folder)
    kubectl("cordon", node)
    cluster_py("stop", "kubelet-2")
    try:
        unfinished = stop_in_a_save(process, folder / "checkpoints")
        cluster_py("cut", worker["status"]["podIP"], head["status"]["podIP"])
        kill_driver(target)
        wait_for("the next attempt trains", lambda: last_attempt(folder) > attempt)
        os.kill(process, signal.SIGCONT)
        wait_for("the straggler leaves", lambda: has_left(worker["metadata"]["uid"]))
        assert not (unfinished / MANIFEST).exists()
    finally:
        cluster_py("start", "kubelet-2")
        kubectl("uncordon", node)


def stop_in_a_save(process: int, checkpoints: Path) -> Path:
    """Stop a process by SIGSTOP while it writes a checkpoint, and return the checkpoint's folder."""
    before = set(checkpoints.iterdir())

    def caught() -> Path | None:
        for folder in set(checkpoints.iterdir()) - before:
            os.kill(process, signal.SIGSTOP)
            if not (folder / MANIFEST).exists():
                return folder
            os.kill(process, signal.SIGCONT)
            before.add(folder)
        return None

    deadline = time.monotonic() + 60
    while (folder := caught()) is None:
        assert time.monotonic() < deadline, "no save was caught"
        time.sleep(0.002)  # a save takes a tenth of a second
    return folder


def last_attempt(folder: Path) -> int:
    """Return the attempt whose workers have started last."""
    attempt: int = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])["attempt"]
    return attempt


def has_left(pod: str) -> bool:
    """Return whether a worker in a pod of the second node has stopped training."""
    logs = filter(Path.is_file, CLUSTER_HOME.glob(LOGS.format(pod=pod)))
    return any(LEFT in log.read_text(errors="replace") for log in logs)


STRAGGLER = Scenario(
    name="straggler",
    fault="a worker is cut off with its node in the middle of a save, its attempt fails, and "
    "later it continues",
    answer="the next attempt takes over; what the old worker still writes is not used, and it "
    "exits",
    actor="KubeRay, trainer",
    rights="the machine",
    strike=lambda target: strand(volume_of(target.cluster.namespace), target),
    within_s=HEAD_S,
    settings=("resources.workers=1",),
)


def test_a_straggler_that_nobody_can_reach_spoils_nothing(team: Team, tmp_path: Path) -> None:
    assert drill(team, STRAGGLER, tmp_path)["attempts"] == 2


def test_nor_does_it_in_a_bucket(bucket_team: Team, bucket: Bucket, tmp_path: Path) -> None:
    strike = partial(strand, bucket.folder)
    assert drill(bucket_team, in_bucket(STRAGGLER, strike=strike), tmp_path)["attempts"] == 2


def is_ready(node: str) -> bool:
    conditions = get("node", "default", node)["status"]["conditions"]
    return {one["type"]: one["status"] for one in conditions}["Ready"] == "True"
