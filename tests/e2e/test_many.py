"""Many runs at the same time on fake nodes: each is created once and ends once."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone

import pytest
from conftest import (
    CLUSTER_HOME,
    ROOT,
    Ended,
    Team,
    cluster_py,
    get,
    require_test_cluster,
    wait_for,
)
from dashboards import Dashboards, answering

pytestmark = pytest.mark.full

RUNS = 50
TWICE = 10
"""The number of runs that two users submit at the same moment."""
WATCHERS = 20
MADE_UP = {
    "nodeSelector": {"trainyard.io/made-up": "true"},
    "tolerations": [{"key": "trainyard.io/made-up", "operator": "Exists"}],
}
SUMMARY = {
    "outcome": "succeeded",
    "resumed_from": None,
    "val_accuracy": 0.5,
    "epochs": 1,
    "train_s": 1.0,
    "samples_per_s": 1.0,
    **{file: f"/runs/made-up/{file}" for file in ("model", "metrics", "report")},
}


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("many")
    changes = {
        f"{section}__{key}": value
        for section in ("head", "pools__cpu")
        for key, value in MADE_UP.items()
    }
    team.install(tmp_path_factory.mktemp("values"), **changes)
    return team


@pytest.fixture(scope="module")
def dashboards() -> Iterator[Dashboards]:
    """Twenty fake nodes, with heads that answer."""
    require_test_cluster("only it has nodes that do not exist")
    cluster_py("kwok", "20")
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000000000Z")
    log = CLUSTER_HOME / "live/made-up.log"
    log.write_text(f"{now} stdout F summary {json.dumps(SUMMARY)}\n")
    dashboards = Dashboards()
    with answering(dashboards):
        yield dashboards
    cluster_py("kwok", "0")


def test_many_runs_outlive_the_operator_and_none_is_created_twice(
    team: Team, dashboards: Dashboards
) -> None:
    def submit(number: int) -> Ended:
        return team.trainyard(
            "submit", "examples/digits.yaml", "--workers=1", f"--name=many-{number}", "--detach"
        )

    wanted = [number for number in range(RUNS) for _ in range(2 if number < TWICE else 1)]
    with ThreadPoolExecutor(8) as people:
        submissions: list[Future[Ended]] = [people.submit(submit, number) for number in wanted]
        wait_for("half of them are there", lambda: len(team.rayjobs()) >= RUNS // 2)
        cluster_py("restart", "ray-operator")
        ended = [submission.result() for submission in submissions]
    assert [one.stderr for one in ended if one.returncode] == []
    said = Counter("is running already" in one.stderr for one in ended)
    assert said == {False: RUNS, True: TWICE}

    watchers = [
        subprocess.Popen(
            [ROOT / ".venv/bin/trainyard", "watch", f"many-{number}", "-n", team.namespace],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(WATCHERS)
    ]
    wait_for("all have a driver", lambda: len(dashboards.submitted) >= RUNS)
    cluster_py("restart", "ray-operator")
    clusters = get("rayclusters.ray.io", team.namespace)["items"]
    assert len(clusters) == RUNS
    dashboards.finish.set()

    told = [watcher.communicate(timeout=300) for watcher in watchers]
    assert [
        (code, words) for code, (_, words) in zip(codes(watchers), told, strict=True) if code
    ] == []
    assert all("succeeded: validation accuracy" in words for words, _ in told)
    wait_for(
        "all have ended",
        lambda: (
            Counter(job["status"]["jobDeploymentStatus"] for job in team.rayjobs())
            == {"Complete": RUNS}
        ),
    )
    jobs = team.rayjobs()
    assert {job["status"].get("failed", 0) for job in jobs} == {0}
    assert dashboards.submitted == {job["status"]["jobId"]: 1 for job in jobs}
    assert dashboards.without_token == []


def codes(watchers: list[subprocess.Popen[str]]) -> list[int | None]:
    return [watcher.returncode for watcher in watchers]
