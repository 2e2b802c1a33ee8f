"""A run -> its plan and its RayJob: the one path that all commands take."""

from __future__ import annotations

from typing import Any

from launcher import rules
from launcher.config import RunConfig
from launcher.merge import merge
from launcher.overlay import Overlay
from launcher.plan import Plan, plan_run
from launcher.platform import Platform
from launcher.render import render_job


def objects_of(
    run: RunConfig, code: Overlay | None, platform: Platform, namespace: str
) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    """The plan, the RayJob, which obeys all rules, and the warnings that go with it. Raises ConfigError."""
    planned = plan_run(run, platform, namespace, code)
    job = merge(render_job(planned), platform, planned)
    doubts = rules.require(job, platform.kuberay, platform.ray_version)
    return planned, job, tuple(map(str, doubts))
