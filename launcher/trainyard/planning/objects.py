"""A run -> its plan and its RayJob: the one path that all commands take."""

from __future__ import annotations

from typing import Any

from trainyard.planning.merge import merge
from trainyard.planning.plan import Plan, plan_run
from trainyard.planning.render import render_job
from trainyard.platform import Platform
from trainyard.rules import check
from trainyard.run_file.code_archive import Overlay
from trainyard.run_file.models import RunConfig


def objects_of(
    run: RunConfig, code: Overlay | None, platform: Platform, namespace: str
) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    """The plan, the RayJob, which obeys all rules, and the warnings that go with it. Raises ConfigError."""
    planned = plan_run(run, platform, namespace, code)
    job = merge(render_job(planned), platform, planned)
    doubts = check.require(job, platform.kuberay, platform.ray_version)
    return planned, job, tuple(map(str, doubts))
