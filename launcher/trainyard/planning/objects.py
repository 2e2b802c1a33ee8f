"""Make the plan and the RayJob of a run. All commands and the Python API use these functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.planning.merge import merge
from trainyard.planning.plan import Plan, plan_run
from trainyard.platform import Platform
from trainyard.run_file.code.code_archive import UPLOAD_LIMIT_MIB, Overlay, pack
from trainyard.run_file.models import RunConfig, RunWithCode


@dataclass(frozen=True, kw_only=True, slots=True)
class RunObjects:
    """The plan and the RayJob of one submission."""

    plan: Plan
    """The numbers of the submission, and the packed code."""
    job: dict[str, Any]
    """The RayJob. It breaks none of the rules whose violation is an error; see `trainyard.rules`."""
    warnings: tuple[str, ...]
    """One sentence for each rule that the RayJob breaks and whose violation is only a warning."""


def run_objects(run: RunConfig, platform: Platform, namespace: str) -> RunObjects:
    """Plan a run, pack its code folder as it is now, and render its RayJob.

    Raises ConfigError if the run cannot be planned, or if the RayJob breaks a rule.
    """
    return run_objects_with_code(run, pack_code(run), platform, namespace)


def run_objects_with_code(
    run: RunConfig, code: Overlay | None, platform: Platform, namespace: str
) -> RunObjects:
    """Plan a run whose code is packed already, and render its RayJob. Raises as `run_objects` does."""
    # Here, because Jinja2 and jsonschema take longer to import than `plan` takes without them.
    from trainyard.planning.render import render_job
    from trainyard.rules import check

    plan = plan_run(run, platform, namespace, code)
    job = merge(render_job(plan), platform, plan)
    warnings = check.require(job, platform.kuberay, platform.ray_version)
    return RunObjects(plan=plan, job=job, warnings=tuple(map(str, warnings)))


def pack_code(run: RunConfig, limit_mib: int | None = UPLOAD_LIMIT_MIB) -> Overlay | None:
    """Pack the code folder that a run file names; None if it names none.

    Raises ConfigError if the folder cannot be read, or if its archive is larger than `limit_mib` MiB.
    """
    if isinstance(run, RunWithCode) and run.code is not None:
        return pack(Path(run.code), limit_mib)
    return None
