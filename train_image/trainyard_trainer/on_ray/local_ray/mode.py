"""The environment variable that chooses how much of Ray a local Ray starts."""

from __future__ import annotations

import os
import sys
from typing import Literal, get_args

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

LocalRayMode = Literal["forked", "small", "full"]
"""`full` starts all processes that `ray.init` starts; `small` leaves out those that a run does not need; and
`forked` also forks the workers of a recipe from a process that has imported PyTorch and Ray."""


def local_ray_mode(*, use_gpu: bool) -> LocalRayMode:
    """Return the mode that the environment asks for; by default `forked` on Linux without GPUs, else `small`.

    Raises ConfigError if the environment names no mode.
    """
    can_fork = sys.platform == "linux" and not use_gpu
    value = os.environ.get(LOCAL_RAY_VARIABLE, "forked" if can_fork else "small")
    for mode in get_args(LocalRayMode):
        if value == mode:
            return mode
    modes = ", ".join(get_args(LocalRayMode))
    raise ConfigError(f"{LOCAL_RAY_VARIABLE} = {value}: must be one of {modes}")
