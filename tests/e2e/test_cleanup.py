"""KubeRay cleans up after a run as its RayJob specifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Team, wait_for

WINDOW_S = 45


@pytest.mark.full
def test_after_a_failure_the_workers_go_at_once_and_the_head_stays_for_its_window(
    make_team: Callable[[str], Team], tmp_path: Path
) -> None:
    team = make_team("cleanup")
    team.install(tmp_path, job__keepHeadSecondsAfterFailure=WINDOW_S)
    settings = ("--set", "faults.retries=0", "--set", "data.source=/mnt/trainyard/not/there")
    ended = team.trainyard(
        "submit", "examples/digits.yaml", "--workers", "1", "--name", "broken", *settings
    )
    assert ended.returncode == 1
    (job,) = team.rayjobs()
    assert job["status"]["jobDeploymentStatus"] == "Failed"
    wait_for("the workers go", lambda: not team.pods(node_type="worker"), WINDOW_S)
    assert len(team.pods(node_type="head")) == 1
    assert "not/there" in team.trainyard("logs", "broken").stdout
    wait_for("the head goes", lambda: not team.pods(node_type="head"), 3 * WINDOW_S)
    assert len(team.rayjobs()) == 1
