"""Add environment variables of a run's driver to its RayJob; `driver_variables` reads them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainyard.errors import ConfigError
from trainyard_trainer.run_files.standing_cluster import job_variables

Object = dict[str, Any]

JOB_LIMIT_KIB = 120
"""The limit for the variables of a driver on a standing cluster together. Ray passes all of them in one
variable, for which Linux allows 128 KiB."""


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
    text = json.dumps({"env_vars": job_variables(spec) | {**variables}}, separators=(",", ":"))
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
