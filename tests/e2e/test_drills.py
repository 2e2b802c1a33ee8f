"""Faults on a real cluster: how runs recover, and what the faults cost.

`make e2e` runs the shortest drill. `make drills` runs all drills one at a time, and stores the results in
build/drills.json.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Team, cluster_py, get, kubectl, set_options, wait_for
from drilling import (
    DIGITS,
    EARLY,
    LONG,
    SETTINGS,
    check,
    drill,
    keep,
    leaving_nothing,
    of_length,
    process_of,
    store,
)

from trainyard.drills.final_errors import FINAL_ERRORS
from trainyard.drills.scenarios import SCENARIOS, WORKER_S, Scenario
from trainyard.drills.strikes import Target
from trainyard.submission.current_status import HEAD_CONTAINER

SHORTEST = "worker-killed"
"""The drill that is also a part of `make e2e`."""
LONGER = "train.epochs=80"
"""The length for drills whose pod has such a long grace period that a shorter run would end before it."""
LENGTHS = {SHORTEST: "train.epochs=10", "worker-deleted": LONGER, "worker-evicted": LONGER}
OPERATOR_AWAY_S = 120.0
API_AWAY_S = 60.0
CUT_OFF_S = 300.0


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("drills")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == SHORTEST else pytest.mark.drills)
        for name in SCENARIOS
    ],
)
def test_a_run_survives_what_the_api_can_strike_it_with(
    team: Team, name: str, tmp_path: Path
) -> None:
    run_file, own = DIGITS, SETTINGS
    if name in LENGTHS:
        run_file, own = of_length(tmp_path, LENGTHS[name])
    settings = set_options(own)
    if name == SHORTEST:
        settings += ("--at-step", str(EARLY))
    with leaving_nothing(team.namespace):
        ended = team.trainyard("drill", name, str(run_file), *settings, "--json")
        assert ended.stdout, ended.stderr
        result = json.loads(ended.stdout)
        keep(result, SCENARIOS[name])
        check(result)
    assert ended.returncode == (0 if result["is_passed"] else 1)


@pytest.mark.drills
@pytest.mark.parametrize("name", FINAL_ERRORS)
def test_an_error_that_a_retry_cannot_cure_uses_one_cluster(team: Team, name: str) -> None:
    with leaving_nothing(team.namespace):
        ended = team.trainyard("drill", name, str(DIGITS), *set_options(SETTINGS), "--json")
        assert ended.stdout, ended.stderr
        result = json.loads(ended.stdout)
        store(name, {"fault": FINAL_ERRORS[name].fault} | result)
        assert result["is_passed"], ended.stdout
    assert ended.returncode == 0


def away(part: str, seconds: float) -> Callable[[Target], None]:
    """Return a fault: a part of the cluster is stopped for a time."""

    def strike(target: Target) -> None:
        cluster_py("stop", part)
        try:
            time.sleep(seconds)
        finally:
            cluster_py("start", part)

    return strike


def cut_off(seconds: float) -> Callable[[Target], None]:
    """Return a fault: the network between the last worker's pod and the head is cut for a time."""

    def strike(target: Target) -> None:
        worker, head = (address_of(target, pod) for pod in (target.workers[-1].pod, target.head))
        cluster_py("cut", worker, head)
        time.sleep(seconds)
        # If the pod has been deleted, its network rules are gone too.
        if target.cluster.get("Pod", target.workers[-1].pod) is not None:
            cluster_py("heal", worker)

    return strike


def crowd_out(target: Target) -> None:
    """Delete a worker's pod without grace period, and prevent another one until training continues."""
    assert workers_of(target) == 2
    namespace = target.cluster.namespace
    in_namespace = ("-n", namespace)
    *_, doomed = (each for each in target.pods() if each["metadata"]["name"] != target.head)
    kubectl("create", "quota", "crowded", "--hard=pods=2", *in_namespace)
    try:
        # Until then another pod may still be admitted.
        wait_for("the quota counts", lambda: "used" in get("quota", namespace, "crowded")["status"])
        target.cluster.delete("Pod", doomed["metadata"]["name"], grace_s=0)
        wait_for("it goes on with one worker", lambda: workers_of(target) == 1)
    finally:
        kubectl("delete", "quota", "crowded", *in_namespace)
    wait_for("it has two workers again", lambda: workers_of(target) == 2)


def workers_of(target: Target) -> int:
    file = f"/mnt/trainyard/{target.run}/workers.json"
    return len(json.loads(target.inside(target.head, HEAD_CONTAINER, "cat", file))["workers"])


def kill_container(target: Target) -> None:
    """Kill all processes of a container, as the kernel does with cgroup v2 if memory is exhausted."""
    pod = target.cluster.get("Pod", target.workers[-1].pod)
    assert pod is not None
    (state,) = pod["status"]["containerStatuses"]
    os.kill(process_of(state["containerID"].rpartition("/")[2], 1), signal.SIGKILL)


def upgrade(target: Target) -> None:
    """Run `helm upgrade` with other sizes for later runs, and then with the previous ones again."""
    head = target.cluster.get("Pod", target.head)
    assert head is not None
    team = Team(target.cluster.namespace, head["spec"]["containers"][0]["image"])
    with tempfile.TemporaryDirectory() as folder:
        team.install(Path(folder), pools__cpu__memoryGib=3)
        team.install(Path(folder))


def address_of(target: Target, pod: str) -> str:
    found = target.cluster.get("Pod", pod)
    assert found is not None
    address: str = found["status"]["podIP"]
    return address


MACHINE = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="container-killed",
            fault="a worker's container is killed with all its processes, as cgroup v2 does when "
            "memory is exhausted",
            answer="it restarts in its pod, and the worker group restarts",
            actor="kubelet, Ray Train",
            rights="the machine",
            strike=kill_container,
            within_s=WORKER_S,
        ),
        Scenario(
            name="operator-down",
            fault="the KubeRay operator is down for two minutes",
            answer="training goes on",
            actor="nobody",
            rights="the machine",
            strike=away("ray-operator", OPERATOR_AWAY_S),
            within_s=WORKER_S,
            has_notice=True,
            restarts="never",
            settings=LONG,
        ),
        Scenario(
            name="api-server-down",
            fault="the API server is down for a minute",
            answer="training goes on, and `watch` reconnects",
            actor="nobody",
            rights="the machine",
            strike=away("kube-apiserver", API_AWAY_S),
            within_s=WORKER_S,
            has_notice=True,
            restarts="never",
            settings=LONG,
        ),
        Scenario(
            name="etcd-restarted",
            fault="etcd is restarted",
            answer="training goes on",
            actor="nobody",
            rights="the machine",
            strike=lambda target: cluster_py("restart", "etcd"),
            within_s=WORKER_S,
            has_notice=True,
            restarts="never",
        ),
        Scenario(
            name="helm-upgrade",
            fault="the platform is upgraded (`helm upgrade`) twice",
            answer="training goes on; the next run uses the new numbers",
            actor="nobody",
            rights="the chart's release",
            strike=upgrade,
            within_s=WORKER_S,
            has_notice=True,
            restarts="never",
        ),
        Scenario(
            name="partition-short",
            fault="a worker's pod and the head are cut off from each other for 30 s",
            answer="training waits; Ray may give up the node although it is back, and the worker "
            "group restarts",
            actor="Ray Train",
            rights="the machine",
            strike=cut_off(30),
            within_s=WORKER_S,
            restarts="maybe",
        ),
        Scenario(
            name="partition-long",
            fault="a worker's pod and the head are cut off from each other for 5 minutes",
            answer="Ray gives up the node; when the network is back, its container restarts, and "
            "the worker group restarts",
            actor="Ray Train",
            rights="the machine",
            strike=cut_off(CUT_OFF_S),
            within_s=WORKER_S,
            lasts_s=CUT_OFF_S,
            settings=LONG,
        ),
    )
}


@pytest.mark.drills
@pytest.mark.parametrize("name", MACHINE)
def test_a_run_survives_what_happens_to_the_cluster(team: Team, name: str, tmp_path: Path) -> None:
    drill(team, MACHINE[name], tmp_path)


@pytest.mark.drills
def test_an_elastic_run_does_without_a_worker_that_is_lost_and_takes_it_back(
    team: Team, tmp_path: Path
) -> None:
    scenario = Scenario(
        name="elastic",
        fault="an elastic run (`workers: {min: 1, max: 2}`) loses a worker's pod, and for a while "
        "there is no room for another",
        answer="it goes on with one worker, and with both when the other one is back",
        actor="Ray Train, Ray's autoscaler",
        rights="create and delete resourcequotas",
        strike=crowd_out,
        within_s=WORKER_S,
        # It starts with one worker, and Ray Train checks for free resources once a minute.
        settings=("resources.workers={min: 1, max: 2}", "train.epochs=160"),
    )
    result = drill(team, scenario, tmp_path, EARLY)
    assert result["attempts"] == 1
