"""The CronJob of `monitoring.progress`: it publishes one line about each run in a ConfigMap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pod_api import pod_api
from test_report_ends import FAILED, SUCCEEDED, rayjob

from trainyard_trainer.notices.api_server import ApiServer
from trainyard_trainer.tools.pods.publish_progress import lines_of_runs, publish

RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
PROGRESS = {"percent": 41.96, "step": 300, "steps": 715, "loss": 0.121345, "eta_s": 305.2}


def line_of(storage: Path, status: dict[str, Any], progress: dict[str, Any] | None) -> str:
    job = rayjob(storage, None, status)
    (run,) = lines_of_runs([job])
    if progress is not None:
        (storage / run).mkdir()
        (storage / run / "progress.json").write_text(json.dumps(progress))
    return lines_of_runs([job])[run]


@pytest.mark.parametrize(
    ("status", "progress", "line"),
    [
        (RUNNING, PROGRESS, "running, 42.0 %, step 300 of 715, loss 0.1213, 5 min left"),
        (RUNNING, PROGRESS | {"eta_s": 12}, "running, 42.0 %, step 300 of 715, loss 0.1213, 12 s left"),
        (RUNNING, {"step": 3, "eta_s": 8040}, "running, step 3, 2 h 14 min left"),
        (RUNNING, {"step": 3, "eta_s": 183600}, "running, step 3, 2 d 3 h left"),
        (RUNNING, {"step": "third", "loss": [1, 2], "percent": None}, "running"),
        (RUNNING, None, "running"),
        ({}, None, "new"),
        ({"jobDeploymentStatus": "Suspended"}, None, "suspended"),
        (SUCCEEDED, PROGRESS | {"percent": 100.0}, "succeeded, 100.0 %, step 300 of 715, loss 0.1213"),
        (FAILED, PROGRESS, "failed, 42.0 %, step 300 of 715, loss 0.1213"),
    ],
)  # fmt: skip
def test_a_line_has_what_is_known(
    tmp_path: Path, status: dict[str, Any], progress: dict[str, Any] | None, line: str
) -> None:
    assert line_of(tmp_path, status, progress) == line


def test_the_newest_rayjob_of_a_run_counts_and_a_foreign_one_does_not(tmp_path: Path) -> None:
    new, old, foreign = (
        rayjob(tmp_path, None, status, creationTimestamp=f"2026-11-{day}T00:00:00Z")
        for status, day in ((RUNNING, "03"), (FAILED, "02"), (RUNNING, "04"))
    )
    foreign["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"] = [{}]
    assert list(lines_of_runs([new, old, foreign]).values()) == ["running"]


def test_the_data_of_the_config_map_is_replaced(tmp_path: Path) -> None:
    job = rayjob(tmp_path, None, RUNNING)
    (name,) = lines_of_runs([job])
    with pod_api(tmp_path, lambda path: {"items": [job], "metadata": {}}) as api:
        publish(ApiServer.of(api.environment, api.account), "trainyard-progress")
    assert api.asked[-1] == ("PATCH", "/api/v1/namespaces/team/configmaps/trainyard-progress")
    assert api.patches == [[{"op": "add", "path": "/data", "value": {name: "running"}}]]
