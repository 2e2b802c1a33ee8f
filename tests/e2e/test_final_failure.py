"""An error that a retry cannot fix costs no further cluster while somebody watches, and little otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from conftest import ROOT, Object, Team, get, kubectl, wait_for

DIGITS = ROOT / "examples/digits.yaml"
WRONG_PATH = ("--workers", "1", "--set", "data.source=/mnt/trainyard/no-such-data")
ENDED_S = 400.0


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    """A team with the platform installed."""
    team = make_team("final")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def clusters_made(team: Team, job: str) -> int:
    """Return the number of RayClusters that KubeRay has created for a RayJob, from its events."""
    events = get("events", team.namespace, "--field-selector", f"involvedObject.name={job}")
    return sum(
        event.get("count") or 1
        for event in events["items"]
        if event["reason"] == "CreatedRayCluster"
    )


def the_job(team: Team, run: str) -> Object:
    (job,) = get("rayjobs.ray.io", team.namespace, "-l", f"trainyard.io/run={run}")["items"]
    return dict(job)


def test_an_attached_submit_uses_one_cluster_and_tells_the_error(team: Team) -> None:
    ended = team.trainyard("submit", DIGITS, "--name", "watched", *WRONG_PATH)
    assert ended.returncode == 1
    assert "no-such-data" in ended.stderr
    job = the_job(team, "watched")
    assert job["spec"]["backoffLimit"] == 0
    assert job["status"]["failed"] == 1
    assert clusters_made(team, job["metadata"]["name"]) == 1


@pytest.mark.full
def test_without_a_watcher_each_retry_repeats_the_first_error(team: Team) -> None:
    rendered = team.trainyard("render", DIGITS, "--name", "alone", *WRONG_PATH, "--from-cluster")
    assert rendered.returncode == 0, rendered.stderr
    kubectl("create", "-f", "-", stdin=yaml.safe_dump(yaml.safe_load(rendered.stdout)))
    wait_for(
        "all attempts have failed",
        lambda: the_job(team, "alone")["status"].get("jobDeploymentStatus") == "Failed",
        ENDED_S,
    )
    job = the_job(team, "alone")
    assert job["status"]["failed"] == 3
    assert "Attempt 1 failed with this error" in job["status"]["message"]
    assert "no-such-data" in job["status"]["message"]
