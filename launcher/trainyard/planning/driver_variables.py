"""The environment variables of a run's driver, in its RayJob.

On a RayCluster of its own they are variables of the head's container. On a standing RayCluster, whose pods
exist before the run, they are in the runtime environment of the Ray job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainyard.errors import ConfigError

Object = dict[str, Any]

JOB_LIMIT_KIB = 120
"""The limit for the variables of a driver on a standing cluster together. Ray passes all of them in one
variable, for which Linux allows 128 KiB."""


def is_on_standing_cluster(job: Object) -> bool:
    """Return whether a RayJob uses a RayCluster that exists without it."""
    return bool(job.get("spec", {}).get("clusterSelector"))


def driver_variables(job: Object) -> dict[str, str]:
    """Return the variables of a RayJob's driver as the driver reads them.

    Those that come from a Secret are left out. A RayJob that trainyard has not made may have none.
    """
    spec = job.get("spec", {})
    if is_on_standing_cluster(job):
        return _variables_of_job(spec)
    head = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    containers = head.get("spec", {}).get("containers") or [{}]
    return {
        each["name"]: each["value"].replace("$$", "$")
        for each in containers[0].get("env") or []
        if "value" in each
    }


def add_to_head(head: Object, variables: Mapping[str, str]) -> None:
    """Append variables to the Ray container of a head, so that the driver reads these values.

    Each dollar sign is doubled, because Kubernetes expands $(NAME) in values of variables.
    """
    container = head["template"]["spec"]["containers"][0]
    container.setdefault("env", []).extend(
        {"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()
    )


def add_to_job(spec: Object, variables: Mapping[str, str]) -> None:
    """Add variables to the runtime environment of a RayJob. Raises ConfigError if they are too large.

    The result is JSON in ASCII, and so valid YAML.
    """
    text = json.dumps({"env_vars": _variables_of_job(spec) | {**variables}}, separators=(",", ":"))
    if len(text) > JOB_LIMIT_KIB * 1024:
        raise ConfigError(
            f"the run's settings and its packed code take {len(text) / 1024:.0f} KiB, and a Ray job on a "
            f"standing cluster may have {JOB_LIMIT_KIB} KiB",
            "Exclude files from the code (.gitignore), or give the run a RayCluster of its own: leave --warm "
            "or resources.cluster out.",
        )
    spec["runtimeEnvYAML"] = text


def json_for_ray(text: str) -> str:
    r"""Return the same JSON in ASCII and without dollar signs: Ray expands $NAME in values of variables.

    >>> json_for_ray('{"command": "echo $HOME"}')
    '{"command":"echo \\u0024HOME"}'
    """
    return json.dumps(json.loads(text), separators=(",", ":")).replace("$", "\\u0024")


def _variables_of_job(spec: Object) -> dict[str, str]:
    """Return the variables in the runtime environment of a RayJob."""
    try:
        found: dict[str, str] = json.loads(spec.get("runtimeEnvYAML") or "{}").get("env_vars", {})
    except (ValueError, AttributeError):
        return {}
    return found
