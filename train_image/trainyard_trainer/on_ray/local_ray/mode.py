"""The environment variable that chooses how much of Ray a local Ray starts."""

from __future__ import annotations

import os
from typing import Literal, get_args

from trainyard_trainer.errors import ConfigError

VARIABLE = "TRAINYARD_LOCAL_RAY"
"""The name of the environment variable; docs/explanation/performance.md describes its values."""

LocalRayMode = Literal["forked", "small", "full"]
"""`full` starts all processes that `ray.init` starts; `small` leaves out those that a run does not need; and
`forked` also forks the workers of a recipe from a process that has imported PyTorch."""


def local_ray_mode(*, use_gpu: bool) -> LocalRayMode:
    """Return the mode that the environment asks for; by default `forked` without and `small` with GPUs.

    Raises ConfigError if the environment names no mode.
    """
    value = os.environ.get(VARIABLE, "small" if use_gpu else "forked")
    for mode in get_args(LocalRayMode):
        if value == mode:
            return mode
    raise ConfigError(f"{VARIABLE} = {value}: must be one of {', '.join(get_args(LocalRayMode))}")
