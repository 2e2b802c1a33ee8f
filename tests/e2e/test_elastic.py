"""A run that grows on a real cluster, with KubeRay's operator, Ray's autoscaler and Ray Train.

The drill `elastic` of test_drills.py removes a worker and adds it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from conftest import Team, kubectl, run, wait_for

LIMIT_S = 600.0
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
LONG = (
    *("examples/digits.yaml", "--name", "elastic", "--workers", "1:2"),
    *("--set", "train.model.image_size=16", "--set", "train.epochs=100000"),
)


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("elastic")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def head(team: Team) -> Iterator[str]:
    """The head of an active elastic run."""
    ended = team.trainyard("submit", *LONG, "--detach")
    assert ended.returncode == 0, ended.stderr
    wait_for("the run is under way", lambda: group_of(team), LIMIT_S)
    yield head_of(team)
    team.trainyard("stop", "elastic", "--now")


def head_of(team: Team) -> str:
    (pod,) = team.pods(node_type="head")
    name: str = pod["metadata"]["name"]
    return name


def inside(team: Team, pod: str, container: str, *command: str) -> str | None:
    """Return the output of a command in a container, or None if it fails."""
    ended = run("kubectl", "exec", "-n", team.namespace, pod, "-c", container, "--", *command)
    return ended.stdout if ended.returncode == 0 else None


def group_of(team: Team) -> int:
    """Return the number of workers of the run, or 0 if there is none."""
    if not team.pods(node_type="head"):
        return 0
    text = inside(team, head_of(team), "ray-head", "cat", "/mnt/trainyard/elastic/workers.json")
    return len(json.loads(text)["workers"]) if text else 0


def test_a_run_that_starts_with_one_node_gets_its_second(team: Team, head: str) -> None:
    assert wait_for("the run has two workers", lambda: group_of(team) == 2, LIMIT_S)
    assert len(team.pods(node_type="worker")) == 2
    (cluster,) = json.loads(kubectl("get", "rayclusters", "-n", team.namespace, "-o", "json"))[
        "items"
    ]
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 2, 2)


def test_the_autoscaler_alone_has_a_token(team: Team, head: str) -> None:
    assert inside(team, head, "autoscaler", "test", "-s", TOKEN) == ""
    assert inside(team, head, "ray-head", "test", "-e", TOKEN) is None
    for pod in team.pods(node_type="worker"):
        assert inside(team, pod["metadata"]["name"], "ray-worker", "test", "-e", TOKEN) is None
