"""Runs in queues of Kueue itself: they wait, are admitted, preempted, suspended and explained.

The queue has room for one run of one worker: the head and worker of a run fit, and no second ones.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from conftest import ROOT, Team, delete_runs, kubectl, wait_for
from drilling import volume_of
from queued_runs import (
    LIMIT_S,
    Object,
    await_admission,
    await_message,
    await_phase,
    done,
    records,
    state,
    submit,
    workloads,
)

from trainyard.drills.timeline import RecordedRun, steps_lost

CLUSTER_QUEUE, COHORT = "e2e-queue", "e2e-cohort"
PAGE = ROOT / "docs/guides/queues.md"
QUEUE = {
    "queue": {
        "system": "kueue",
        "name": "runs",
        "kueue": {
            "clusterQueue": CLUSTER_QUEUE,
            "nodes": {"cpu": 1},
            "runs": 1,
            "cohort": COHORT,
        },
    },
    "priorityClasses": [{"name": "e2e-urgent", "value": 1000, "description": "Preempts others."}],
}
WITH_CLASS = ("--set", "queue.priority=e2e-urgent")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("queue")
    team.install(tmp_path_factory.mktemp("values"), **QUEUE)
    return team


@pytest.fixture(autouse=True)
def empty_queue(team: Team) -> Iterator[None]:
    """Each test ends with an empty queue."""
    yield
    delete_runs(team.namespace)


def watch_until(team: Team, name: str, words: str) -> None:
    """Watch a run until a line of the output contains the words, and press Ctrl-C then."""
    command = (ROOT / ".venv/bin/trainyard", "watch", name, "-n", team.namespace)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as watch:
        assert watch.stdout is not None
        seen = ""
        for line in watch.stdout:
            seen += line
            if words in " ".join(seen.split()):
                watch.send_signal(signal.SIGINT)
                return
    raise AssertionError(seen)


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def test_a_run_is_admitted_and_the_next_ones_wait_with_position_and_reason(team: Team) -> None:
    submit(team, "first")
    await_admission(team, "first")
    # Heads and workers share the flavor of their nodes.
    assigned = workloads(team, "first")[0]["status"]["admission"]["podSetAssignments"]
    assert {flavor for each in assigned for flavor in each["flavors"].values()} == {"e2e-queue-cpu"}
    submit(team, "second")
    submit(team, "third")
    second = await_message(team, "second", "at position 1: ")
    assert "more memory needed in flavor e2e-queue-" in second
    assert len(await_message(team, "third", "at position 2: ")) < 250
    assert state(team, "third")["phase"] == "queued"
    listed = json.loads(team.trainyard("list", "--json").stdout)["runs"]
    assert {row["run"]: row["phase"] for row in listed}["second"] == "queued"
    assert "waits in Kueue queue runs at position 1" in done(team, "list")
    watch_until(team, "third", "at position 2")
    explained = done(team, "explain", "third")
    assert "at position 2" in explained
    assert explained.count("insufficient unused quota") == 0


def test_a_queued_run_is_suspended_at_once_resumed_and_stopped(team: Team) -> None:
    submit(team, "first")
    await_admission(team, "first")
    submit(team, "second")
    assert "its queue passes it over" in done(team, "suspend", "second")
    await_phase(team, "second", "suspended")
    assert "is suspended already" in done(team, "suspend", "second")
    assert "passes it over until it is resumed" in done(team, "explain", "second")
    done(team, "stop", "first", "--now")
    assert state(team, "second")["phase"] == "suspended"
    assert "it waits in queue runs" in done(team, "resume", "second")
    await_admission(team, "second")
    submit(team, "third")
    await_phase(team, "third", "queued")
    assert "no driver was running" in done(team, "stop", "third")


@pytest.mark.parametrize("options", [(), WITH_CLASS], ids=["without a class", "with a class"])
def test_an_admitted_run_is_suspended_and_resumed(team: Team, options: tuple[str, ...]) -> None:
    submit(team, "first", *options)
    await_admission(team, "first")
    assert "its nodes become free" in done(team, "suspend", "first")
    await_phase(team, "first", "suspended")
    wait_for("its pods are leaving", lambda: all(map(is_leaving, team.pods())), LIMIT_S)
    done(team, "resume", "first")
    await_admission(team, "first")


def test_a_run_that_gives_way_to_a_higher_priority_goes_on_later_and_loses_no_step(
    team: Team,
) -> None:
    submit(team, "low")
    folder = volume_of(team.namespace) / "low"

    def trained(attempt: int) -> list[Object]:
        """Return the records of worker groups that have made their first step in an attempt."""
        starts = records(folder, "starts.jsonl")
        return [each for each in starts if each["attempt"] == attempt and "startup" in each]

    wait_for("it trains", lambda: trained(1), LIMIT_S)
    submit(team, "urgent", *WITH_CLASS)
    await_admission(team, "urgent")
    await_phase(team, "low", "queued")
    explained = done(team, "explain", "low")
    assert "was put back (Preempted for run urgent) and waits in Kueue queue runs" in explained
    done(team, "stop", "urgent", "--now")
    wait_for("it goes on", lambda: trained(2), LIMIT_S)
    attempts, starts = (records(folder, file) for file in ("attempts.jsonl", "starts.jsonl"))
    assert trained(2)[0]["step"] > 0
    assert steps_lost(RecordedRun(attempts=attempts, starts=starts, failures=[]), 0) == 0


@pytest.fixture
def room_for_two_pods(team: Team) -> Iterator[None]:
    """A quota like a node that is full with one run. It does not count pods with a deadline."""
    quota = ("quota", "one-run", "-n", team.namespace)
    kubectl("create", *quota, "--hard=pods=2", "--scopes=NotTerminating")
    yield
    kubectl("delete", *quota)


def test_the_pods_of_an_ended_run_go_at_once_and_the_next_run_starts(
    team: Team, room_for_two_pods: None
) -> None:
    submit(team, "short", epochs=1)
    await_admission(team, "short")
    submit(team, "next")
    await_phase(team, "next", "queued")
    await_phase(team, "short", "succeeded")
    await_phase(team, "next", "running")
    assert "succeeded: validation accuracy" in done(team, "logs", "short")


def test_a_run_larger_than_all_quota_is_told_so(team: Team) -> None:
    submit(team, "large", workers="4")
    await_message(team, "large", "asked for, flavor")
    explained = done(team, "explain", "large")
    assert "larger than all quota of Kueue queue runs" in explained
    assert "waiting does not help" in explained


@pytest.fixture
def lender(team: Team) -> Iterator[None]:
    """Another ClusterQueue of the cohort, which nobody uses and which has room for one run."""
    found = json.loads(kubectl("get", "clusterqueue", CLUSTER_QUEUE, "-o", "json"))
    spec = {
        key: found["spec"][key] for key in ("cohortName", "namespaceSelector", "resourceGroups")
    }
    body = {"apiVersion": found["apiVersion"], "kind": "ClusterQueue"}
    body |= {"metadata": {"name": "e2e-lender"}, "spec": spec}
    kubectl("create", "-f", "-", stdin=json.dumps(body))
    yield
    kubectl("delete", "clusterqueue", "e2e-lender")


def borrowed() -> bool:
    """Whether the team's ClusterQueue uses quota of another one."""
    found = json.loads(kubectl("get", "clusterqueue", CLUSTER_QUEUE, "-o", "json"))
    used = (each for flavor in found["status"]["flavorsUsage"] for each in flavor["resources"])
    return any(each.get("borrowed", "0") != "0" for each in used)


def test_a_second_run_borrows_the_quota_of_another_queue(team: Team, lender: None) -> None:
    submit(team, "own")
    await_admission(team, "own")
    assert not borrowed()
    submit(team, "borrows")
    await_admission(team, "borrows")
    wait_for("Kueue counts it as borrowed", borrowed, 30)
    submit(team, "waits")
    await_phase(team, "waits", "queued")


def test_each_command_of_the_page_works(team: Team) -> None:
    """The page names a namespace `team` and a run `digits`, which waits."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [shlex.split(line) for line in "".join(blocks).splitlines()]
    assert [command[:2] for command in commands] == [
        ["trainyard", "status"],
        ["trainyard", "explain"],
    ]
    with held(team):
        submit(team, "digits")
        await_phase(team, "digits", "queued")
        for _, *words in commands:
            assert "Kueue queue runs" in done(team, *words[:-2])


@contextmanager
def held(team: Team) -> Iterator[str]:
    """The queue of the team, while an administrator holds its ClusterQueue."""

    def stop_policy(value: str) -> None:
        patch = json.dumps({"spec": {"stopPolicy": value}})
        kubectl("patch", "clusterqueue", CLUSTER_QUEUE, "--type=merge", "-p", patch)

    stop_policy("Hold")
    yield "runs"
    stop_policy("None")


@contextmanager
def leading_nowhere(team: Team) -> Iterator[str]:
    """A LocalQueue whose ClusterQueue does not exist."""
    body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    body |= {"metadata": {"name": "nowhere"}, "spec": {"clusterQueue": "e2e-nowhere"}}
    kubectl("create", "-n", team.namespace, "-f", "-", stdin=json.dumps(body))
    yield "nowhere"
    kubectl("delete", "localqueue", "nowhere", "-n", team.namespace)


@contextmanager
def missing(_: Team) -> Iterator[str]:
    """A queue that does not exist."""
    yield "nosuch"


@pytest.mark.parametrize(
    ("queue", "cause"),
    [
        (held, "Kueue queue runs admits nothing: "),
        (leading_nowhere, "Kueue queue nowhere admits nothing: "),
        (missing, "LocalQueue nosuch doesn't exist"),
    ],
)
def test_a_queue_that_admits_nothing_is_explained(
    team: Team, queue: Callable[[Team], AbstractContextManager[str]], cause: str
) -> None:
    with queue(team) as name:
        submit(team, "first", "--set", f"queue.name={name}")
        wait_for("its cause is known", lambda: cause in done(team, "explain", "first"), 30)
