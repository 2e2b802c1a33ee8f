"""Set the environment variables of a run file (`env`), in the driver and in all Ray workers that it starts.

The variables reach the driver in its config. Ray gives them to the workers: `ray.init` reads the environment
of a job's workers from a variable that Ray's own job server sets, too. So they are in place before Ray is
imported, and whoever calls `ray.init`, also in the user's code, need not know them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray 2.60 sets for the entrypoint of a job: its metadata, and the runtime environment that
`ray.init` takes."""


def set_variables(
    variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables for this process and its children, and for all Ray workers of its job."""
    if not variables:
        return
    environment.update(variables)
    variables_of_workers = (job_config(environment).get("runtime_env") or {}).get("env_vars") or {}
    change_runtime_env(environment, env_vars={**variables_of_workers, **variables})


def job_config(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return Ray's config of the job whose entrypoint has this environment; empty outside of a job."""
    job: dict[str, Any] = json.loads(environment.get(JOB_CONFIG_VARIABLE, "{}"))
    return job


def ray_job_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the Ray job whose entrypoint this process is; None if Ray has not started it.

    >>> ray_job_of({"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "digits-1-x7k2p"}}'})
    'digits-1-x7k2p'
    """
    found: str | None = (job_config(environment).get("metadata") or {}).get("job_submission_id")
    return found


def keep_from_workers(
    names: Collection[str], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Remove variables of this process from those that Ray gives to the workers of its job.

    The variables with which a job is submitted reach its workers, too. Of a worker without variables of its
    own, Ray can use a process that it has started before.
    """
    runtime_env = job_config(environment).get("runtime_env") or {}
    variables = runtime_env.get("env_vars") or {}
    kept = {name: value for name, value in variables.items() if name not in names}
    if kept != variables:
        change_runtime_env(environment, env_vars=kept)


def change_runtime_env(environment: MutableMapping[str, str], **fields: Any) -> None:
    """Set fields of the runtime environment that `ray.init` takes from this environment."""
    job = job_config(environment)
    job["runtime_env"] = {**(job.get("runtime_env") or {}), **fields}
    environment[JOB_CONFIG_VARIABLE] = json.dumps(job)
