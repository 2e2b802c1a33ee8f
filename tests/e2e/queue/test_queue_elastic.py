"""Elastic runs in a queue of Kueue: each size is a Workload, a slice, that replaces the one before.

The queue has room for two workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from conftest import Team, delete_runs, wait_for
from drilling import volume_of
from queued_runs import await_admission, await_message, await_phase, done, state, submit, workloads

from trainyard.submission.queue_wait import is_finished
from trainyard.submission.status import condition

LIMIT_S = 300.0
QUEUE = {
    "system": "kueue",
    "name": "slices",
    "kueue": {"clusterQueue": "e2e-elastic", "nodes": {"cpu": 2}, "runs": 2, "elastic": True},
}


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("slices")
    team.install(tmp_path_factory.mktemp("values"), queue=QUEUE)
    return team


@pytest.fixture(autouse=True)
def empty_queue(team: Team) -> Iterator[None]:
    """Each test ends with an empty queue."""
    yield
    delete_runs(team.namespace)


def group_size(team: Team, name: str) -> int:
    """Return the number of workers of a run that trains, or 0 before its first worker group."""
    file = volume_of(team.namespace) / name / "workers.json"
    return len(json.loads(file.read_text())["workers"]) if file.exists() else 0


def phase_in_list(team: Team, name: str) -> str:
    rows = json.loads(done(team, "list", "--json"))["runs"]
    (phase,) = (row["phase"] for row in rows if row["run"] == name)
    return str(phase)


def test_a_run_grows_as_soon_as_its_queue_has_room(team: Team) -> None:
    submit(team, "other")
    await_admission(team, "other")
    submit(team, "grows", workers="1:2")
    await_phase(team, "grows", "running")
    wait_for(
        "its next size waits for quota",
        lambda: [*map(is_finished, workloads(team, "grows"))].count(False) == 2,
        LIMIT_S,
    )
    wait_for("it trains with one worker", lambda: group_size(team, "grows") == 1, LIMIT_S)
    assert state(team, "grows")["phase"] == phase_in_list(team, "grows") == "running"
    assert "waits in Kueue" not in done(team, "explain", "grows")
    done(team, "stop", "other", "--now")
    wait_for("it trains with two workers", lambda: group_size(team, "grows") == 2, LIMIT_S)
    old, new = workloads(team, "grows")
    assert condition(old, "Finished")["reason"] == "WorkloadSliceReplaced"
    assert condition(new, "Admitted")["status"] == "True"
    assert state(team, "grows")["phase"] == "running"
    # Kueue 0.17 does not start a run again that has grown.
    done(team, "suspend", "grows")
    await_phase(team, "grows", "suspended")
    assert "passes it over until it is resumed" in done(team, "explain", "grows")
    done(team, "resume", "grows")
    await_message(team, "grows", "Kueue could not start it: ", limit_s=60)
    assert "admitted the run and could not start it: " in done(team, "explain", "grows")
    done(team, "stop", "grows")
    submit(team, "grows", workers="1:2")
    await_phase(team, "grows", "running")
