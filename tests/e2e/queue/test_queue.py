"""Runs in queues of Kueue itself: they wait, are admitted, suspended, and too large.

The queue has room for one run of one worker: the head and worker of a run fit, and no second ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from conftest import ROOT, Object, Team, get, kubectl, run, wait_for

LIMIT_S = 180.0
QUEUE = {
    "queue": {
        "system": "kueue",
        "name": "runs",
        "kueue": {"clusterQueue": "e2e-queue", "nodes": {"cpu": 1}, "runs": 1},
    },
    "priorityClasses": [{"name": "e2e-urgent", "value": 1000, "description": "Preempts others."}],
}
LONG = (
    *("examples/digits.yaml", "--workers", "1", "--detach"),
    *("--set", "train.model.image_size=16", "--set", "train.epochs=100000"),
)
WITH_CLASS = ("--set", "queue.priority=e2e-urgent")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("queue")
    team.install(tmp_path_factory.mktemp("values"), **QUEUE)
    return team


@pytest.fixture(autouse=True)
def empty_queue(team: Team) -> Iterator[None]:
    """Each test ends with an empty queue. Nobody waits for what the pods would save."""
    yield
    jobs = ("rayjobs.ray.io,rayclusters.ray.io", "--all", "-n", team.namespace)
    kubectl("delete", *jobs, "--wait=false")
    kubectl("delete", "pods", "--all", "-n", team.namespace, "--grace-period=1")
    kubectl("delete", *jobs)


def submit(team: Team, name: str, *options: str) -> None:
    ended = team.trainyard("submit", *LONG, "--name", name, *options)
    assert ended.returncode == 0, ended.stderr


def state(team: Team, name: str) -> Object:
    (found,) = team.status(name)["submissions"]
    return dict(found)


def await_phase(team: Team, name: str, *phases: str) -> Object:
    found: Object = wait_for(
        f"{name} is {phases}",
        lambda: (row := state(team, name))["phase"] in phases and row,
        LIMIT_S,
        seen=lambda: state(team, name),
    )
    return found


def done(team: Team, *command: str) -> str:
    ended = team.trainyard(*command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def workload(team: Team, name: str) -> Object:
    (found,) = (
        each
        for each in get("workloads.kueue.x-k8s.io", team.namespace)["items"]
        if each["metadata"]["ownerReferences"][0]["name"].startswith(f"{name}-")
    )
    return dict(found)


def test_a_run_is_admitted_and_the_next_ones_wait_with_position_and_reason(team: Team) -> None:
    submit(team, "first")
    await_phase(team, "first", "starting", "submitting", "running")
    submit(team, "second")
    submit(team, "third")

    def place(name: str, position: int) -> str:
        message: str = wait_for(
            f"{name} waits",
            lambda: (
                f"at position {position}: " in state(team, name)["message"]
                and state(team, name)["message"]
            ),
            30,
            seen=lambda: state(team, name),
        )
        return message

    assert "more memory needed in flavor e2e-queue-" in place("second", 1)
    assert len(place("third", 2)) < 250
    assert state(team, "third")["phase"] == "queued"
    listed = json.loads(done(team, "list", "--json"))["runs"]
    assert {row["run"]: row["phase"] for row in listed}["second"] == "queued"
    assert "waits in Kueue queue runs at position 1" in " ".join(done(team, "list").split())
    program = (ROOT / ".venv/bin/trainyard", "watch", "third", "-n", team.namespace)
    watched = run("timeout", "--signal=INT", "25", *program)
    assert "at position 2" in " ".join((watched.stdout + watched.stderr).split())
    explained = done(team, "explain", "third")
    assert "at position 2" in explained
    assert explained.count("insufficient unused quota") == 0


def test_a_queued_run_is_suspended_resumed_and_stopped(team: Team) -> None:
    submit(team, "first")
    await_phase(team, "first", "starting", "submitting", "running")
    submit(team, "second")
    await_phase(team, "second", "queued")
    assert "its queue passes it over" in done(team, "suspend", "second")
    await_phase(team, "second", "suspended")
    assert "is suspended already" in done(team, "suspend", "second")
    assert "passes it over until it is resumed" in done(team, "explain", "second")
    done(team, "stop", "first", "--now")
    assert state(team, "second")["phase"] == "suspended"
    assert "it waits in queue runs" in done(team, "resume", "second")
    await_phase(team, "second", "starting", "submitting", "running")
    submit(team, "third")
    await_phase(team, "third", "queued")
    assert "no driver was running" in done(team, "stop", "third")


@pytest.mark.parametrize("options", [(), WITH_CLASS], ids=["without a class", "with a class"])
def test_an_admitted_run_is_suspended_and_resumed(team: Team, options: tuple[str, ...]) -> None:
    submit(team, "first", *options)
    await_phase(team, "first", "starting", "submitting", "running")
    assert "its nodes become free" in done(team, "suspend", "first")
    await_phase(team, "first", "suspended")
    wait_for("its pods are leaving", lambda: all(map(is_leaving, team.pods())), LIMIT_S)
    done(team, "resume", "first")
    await_phase(team, "first", "starting", "submitting", "running")


def test_heads_and_workers_share_the_flavor_of_their_nodes(team: Team) -> None:
    submit(team, "first")
    await_phase(team, "first", "starting", "submitting", "running")
    assigned = workload(team, "first")["status"]["admission"]["podSetAssignments"]
    flavors = {flavor for each in assigned for flavor in each["flavors"].values()}
    assert flavors == {"e2e-queue-cpu"}


def test_a_run_larger_than_all_quota_is_told_so(team: Team) -> None:
    submit(team, "large", "--workers", "4")
    wait_for(
        "Kueue has looked at it",
        lambda: "asked for, flavor" in state(team, "large")["message"],
        30,
        seen=lambda: state(team, "large"),
    )
    explained = done(team, "explain", "large")
    assert "larger than all quota of Kueue queue runs" in explained
    assert "waiting does not help" in " ".join(explained.split())
