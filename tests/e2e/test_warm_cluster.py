"""Runs on the platform's standing RayCluster: changed code, places, stop and resume, lost processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Object, Team, get, run, wait_for

DIGITS = "examples/digits.yaml"
LONG = ("--set", "train.epochs=400", "--set", "checkpoint.every_s=5")
WORKERS = 2
"""The places of the standing cluster."""


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("warm")
    standing = {"enabled": True, "pool": "cpu", "replicas": WORKERS}
    team.install(tmp_path_factory.mktemp("values"), rayCluster=standing)
    wait_for("the standing cluster is ready", lambda: standing_cluster(team)["state"] == "ready")
    return team


def standing_cluster(team: Team) -> Object:
    found: Object = get("raycluster", team.namespace, "trainyard").get("status") or {}
    return {"state": "", **found}


@pytest.fixture
def long_run(team: Team) -> Iterator[str]:
    """A run that trains on both places until the test ends."""
    name = "long"
    submit(team, DIGITS, "--name", name, *LONG)
    step_of(team, name, at_least=5)
    yield name
    team.trainyard("stop", name, "--now")


def submit(team: Team, file: str | Path, *options: str, wait: bool = False) -> None:
    how = "--wait" if wait else "--detach"
    ended = team.trainyard("submit", str(file), "--warm", "--workers", f"{WORKERS}", how, *options)
    assert ended.returncode == 0, ended.stderr


def step_of(team: Team, name: str, at_least: int) -> int:
    """Wait until a run has trained so many steps, and return the step."""

    def step() -> int:
        progress = newest(team, name)["progress"] or {}
        return found if (found := progress.get("step", 0)) >= at_least else 0

    found: int = wait_for(f"{name} trains step {at_least}", step, seen=lambda: newest(team, name))
    return found


def newest(team: Team, name: str) -> Object:
    return dict(team.status(name)["submissions"][-1])


def own_code(folder: Path, said: str) -> Path:
    """Write a run whose program says something, and return its run file."""
    folder.mkdir(exist_ok=True)
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "words.py").write_text(f"WORDS = {said!r}\n")
    (folder / "code" / "say.py").write_text("import words\nprint('said', words.WORDS)\n")
    file = folder / "say.yaml"
    document: dict[str, Any] = {"name": "say", "command": ["python", "say.py"], "code": "code"}
    file.write_text(yaml.safe_dump(document | {"resources": {"workers": 1}}))
    return file


def pods(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods(cluster="trainyard")}


def in_pod(team: Team, pod: str, *command: str) -> str:
    ended = run("kubectl", "exec", "-n", team.namespace, pod, "--", *command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


KILL = """
import os, signal, sys
from pathlib import Path
found = [
    int(path.parent.name)
    for path in Path("/proc").glob("[0-9]*/cmdline")
    if path.read_bytes().replace(bytes(1), b" ").decode().startswith(sys.argv[1])
]
os.kill(max(found), signal.SIGKILL)
"""
"""Kills the newest process whose command line begins with the argument."""


def kill(team: Team, pod: str, command: str) -> None:
    in_pod(team, pod, "python", "-I", "-c", KILL, command)


def head(team: Team) -> str:
    (pod,) = team.pods(cluster="trainyard", node_type="head")
    return str(pod["metadata"]["name"])


def test_changed_code_runs_on_the_same_pods(team: Team, tmp_path: Path) -> None:
    before = pods(team)
    for words in ("one $HOME", "two ${HOME} $(HOME) \N{SNOWMAN}"):
        submit(team, own_code(tmp_path, words), wait=True)
        assert f"said {words}" in team.trainyard("logs", "say").stdout
    assert pods(team) == before
    assert len({job["metadata"]["name"] for job in team.rayjobs()}) == 2


def test_what_the_pods_cannot_give_is_refused_before_the_submission(team: Team) -> None:
    many = team.trainyard("submit", DIGITS, "--warm", "--workers", "4", "--name", "many")
    assert many.returncode == 2
    assert "needs 4 nodes, and the standing cluster trainyard has 2 of pool cpu" in many.stderr
    image = team.trainyard("submit", DIGITS, "--warm", "--set", "image=a/b:1", "--name", "other")
    assert image.returncode == 2
    assert f"its pods have the image {team.image}" in image.stderr


def test_a_second_run_waits_for_its_places_and_shows_where_it_stands(
    team: Team, long_run: str, tmp_path: Path
) -> None:
    submit(team, own_code(tmp_path, "at last"), "--name", "second")
    place = "waits for 2 of the 2 places of cluster trainyard at position 1, behind long"
    wait_for("it waits", lambda: newest(team, "second")["phase"] == "queued")
    assert newest(team, "second")["message"] == place
    listed = json.loads(team.trainyard("list", "--json").stdout)["runs"]
    assert {row["run"]: row["message"] for row in listed}["second"] == place
    assert place in team.trainyard("explain", "second").stdout
    assert newest(team, long_run)["phase"] == "running"

    stopped = team.trainyard("stop", long_run)
    assert "its driver ended by itself, its checkpoint is of step" in stopped.stderr
    watched = team.trainyard("watch", "second")
    assert watched.returncode == 0, watched.stderr
    assert "said at last" in team.trainyard("logs", "second").stdout


def test_a_stopped_run_resumes_and_suspend_is_refused(team: Team, long_run: str) -> None:
    refused = team.trainyard("suspend", long_run)
    assert refused.returncode == 3
    assert "KubeRay suspends no RayJob" in refused.stderr
    stopped = team.trainyard("stop", long_run)
    assert "its driver ended by itself" in stopped.stderr
    submit(team, DIGITS, "--name", long_run, *LONG)
    resumed = step_of(team, long_run, at_least=1)
    # A machine that is too busy for a checkpoint within 20 s tells no step.
    if told := re.search(r"its checkpoint is of step (\d+)", stopped.stderr):
        assert resumed >= int(told[1])
    assert "start: checkpoint" in team.trainyard("logs", long_run).stdout


UNTIL_SIGTERM = """
import signal, sys

def save(*_):
    print("saved its state", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("works", flush=True)
while True:
    signal.pause()
"""


def test_a_program_that_saves_at_sigterm_ends_in_good_order(team: Team, tmp_path: Path) -> None:
    file = own_code(tmp_path, "never")
    (tmp_path / "code" / "say.py").write_text(UNTIL_SIGTERM)
    submit(team, file, "--name", "patient")
    wait_for("it works", lambda: "works" in team.trainyard("logs", "patient").stdout)
    stopped = team.trainyard("stop", "patient")
    assert stopped.returncode == 0, stopped.stderr
    assert "its driver ended by itself" in stopped.stderr
    assert "saved its state" in team.trainyard("logs", "patient").stdout
    assert team.status("patient")["summary"]["outcome"] == "stopped"


def test_a_killed_worker_and_a_killed_driver_cost_only_steps(team: Team, long_run: str) -> None:
    workers = [
        pod["metadata"]["name"] for pod in team.pods(cluster="trainyard", node_type="worker")
    ]
    attempt = newest(team, long_run)["progress"]["attempt"]
    kill(team, workers[0], "ray::RayTrainWorker")
    wait_for(
        "the workers start anew",
        lambda: "failed:" in team.trainyard("logs", long_run).stdout,
    )
    step_of(team, long_run, at_least=newest(team, long_run)["progress"]["step"] + 5)

    # The newest process with this command line is the attempt, and its parent starts the next one.
    kill(team, head(team), "python -I -u -m trainyard_trainer")
    wait_for(
        "the next attempt trains",
        lambda: newest(team, long_run)["progress"]["attempt"] == attempt + 1,
    )
    assert len([job for job in team.rayjobs() if job["metadata"]["name"].startswith("long-")]) == 1


def test_an_error_that_a_retry_cannot_cure_is_not_retried(team: Team, tmp_path: Path) -> None:
    file = own_code(tmp_path, "never")
    (tmp_path / "code" / "say.py").write_text("import nothing_of_this_name\n")
    ended = team.trainyard("submit", str(file), "--warm", "--workers", "2", "--name", "broken")
    assert ended.returncode == 1
    assert "No module named 'nothing_of_this_name'" in ended.stderr
    assert team.status("broken")["summary"]["attempts"] == 1


def test_an_idle_cluster_gives_its_nodes_back_until_the_next_run(
    make_team: Callable[[str], Team], tmp_path: Path
) -> None:
    team = make_team("warm-idle")
    team.install(tmp_path, rayCluster={"enabled": True, "replicas": WORKERS, "idleMinutes": 1})
    wait_for("the standing cluster is ready", lambda: standing_cluster(team)["state"] == "ready")

    def workers() -> int:
        return len(team.pods(cluster="trainyard", node_type="worker"))

    wait_for("the workers are deleted", lambda: not workers(), limit_s=600)
    submit(team, own_code(tmp_path, "back again"), wait=True)
    assert "said back again" in team.trainyard("logs", "say").stdout
    assert workers() == WORKERS


def test_the_first_step_after_a_submission(team: Team) -> None:
    """Print the seconds from the command to the first step, of a warm cluster and of one of the run's own."""
    for name, options in (("warm-start", ("--warm",)), ("own-start", ())):
        began = time.time()
        ended = team.trainyard(
            "submit", DIGITS, "--workers", "2", "--name", name, "--set", "train.epochs=1", *options
        )
        assert ended.returncode == 0, ended.stderr
        startup = team.status(name)["summary"]["startup"]
        first = startup.pop("began") + sum(startup.values()) - began
        print(f"{name}: {first:.1f} s from the command to the first step: {startup}")
