"""The health check that the guide gives to Argo CD: it agrees with the phases of `trainyard status`."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from trainyard.submission.status import phase_of

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/gitops.md"
DEPLOYMENTS = (
    "", "Initializing", "Waiting", "Running", "Retrying", "Suspending", "Suspended", "Complete", "Failed",
    "ValidationFailed",
)  # fmt: skip
JOBS = ("", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED")
HEALTH = {
    "succeeded": "Healthy",
    "stopped": "Degraded",
    "failed": "Degraded",
    "suspended": "Suspended",
}


def health_of(job: dict[str, Any]) -> dict[str, str]:
    """Return what Argo CD shows of a RayJob: it runs the check with the global variable `obj`."""
    (block,) = re.findall(r"```text\n(# ConfigMap argocd-cm.*?)```", PAGE.read_text(), re.S)
    (check,) = yaml.safe_load(block)["data"].values()
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(job, recursive=True)
    return dict(lua.execute(check).items())


@pytest.mark.parametrize(("deployment", "job"), list(product(DEPLOYMENTS, JOBS)))
def test_argo_cd_shows_the_phase_of_a_run(deployment: str, job: str) -> None:
    status = {"jobDeploymentStatus": deployment, "jobStatus": job}
    expected = HEALTH.get(phase_of(status), "Progressing")
    assert health_of({"status": status})["status"] == expected


def test_a_rayjob_without_a_status_has_just_been_made() -> None:
    assert health_of({"spec": {}}) == {"status": "Progressing", "message": ""}


def test_argo_cd_shows_why_a_run_has_failed() -> None:
    status = {
        "jobDeploymentStatus": "Failed",
        "reason": "AppFailed",
        "message": "error: no such file",
    }
    assert health_of({"status": status})["message"] == "error: no such file"
