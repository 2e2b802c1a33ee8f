"""A run stops at its limit of time, costs no further cluster, and goes on when it is submitted again."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Team, get, wait_for

DIGITS = ROOT / "examples/digits.yaml"
LONG = ("--workers", "1", "--set", "train.epochs=5000")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    """A team with the platform installed."""
    team = make_team("limits")
    team.install(tmp_path_factory.mktemp("values"), job__ttlSecondsAfterFinished=5)
    return team


@pytest.mark.full
def test_a_run_stops_at_its_limit_and_the_next_submission_goes_on(team: Team) -> None:
    first = team.trainyard("submit", DIGITS, *LONG, "--set", "limits.max_run_s=60")
    assert first.returncode == 1
    stopped = re.search(
        r"stopped at its limit, limits.max_run_s = 60, after (\d+) of", first.stderr
    )
    assert stopped is not None, first.stderr
    (job,) = team.rayjobs()
    assert job["status"]["jobDeploymentStatus"] == "Complete"
    assert job["status"]["jobStatus"] == "STOPPED"
    assert job["status"].get("failed", 0) == 0
    wait_for(
        "the cluster of the stopped run is deleted",
        lambda: not get("rayclusters.ray.io", team.namespace)["items"],
    )
    said = team.trainyard("explain", "digits").stdout
    assert "limits.max_run_s" in said
    again = team.trainyard("submit", DIGITS, *LONG, "--set", "limits.max_run_s=61")
    assert "limits.max_run_s = 61" in again.stderr
    steps = [int(step) for step in re.findall(r"step (\d+)/\d+ .* attempt 2", again.stderr)]
    assert min(steps) >= int(stopped[1]) > 0


@pytest.mark.full
def test_submit_waits_no_longer_than_its_timeout_and_leaves_the_run_alone(team: Team) -> None:
    ended = team.trainyard("submit", DIGITS, "--name", "patient", *LONG, "--timeout", "5")
    assert ended.returncode == 124
    assert "it goes on as RayJob patient-" in ended.stderr
    assert team.trainyard("stop", "patient", "--now").returncode == 0
