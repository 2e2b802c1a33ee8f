"""The program of a run with the user's code: its command line and its environment."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from typing_extensions import assert_never

from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    CommandConfig,
    FunctionConfig,
)
from trainyard_trainer.config.user_code import fill_command
from trainyard_trainer.environment import JOB_CONFIG_VARIABLE, job_config
from trainyard_trainer.on_ray.ray_cluster import address
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.programs.isolation import (
    isolated,
    isolated_python,
    python_with_code,
)
from trainyard_trainer.user_code import library_hook
from trainyard_trainer.user_code.library_hook.output import FOLDER_VARIABLE
from trainyard_trainer.user_code.library_variables import When, library_variables

UserCode = CommandConfig | FunctionConfig
"""The config of a run with the user's code."""


def command_of(config: UserCode, attempt: int) -> list[str]:
    """Return the command line of the program: its executable and its arguments."""
    if isinstance(config, FunctionConfig):
        return [*python_with_code(), "trainyard_trainer.user_code.function"]
    filled = fill_command(config.command, placeholders(config, attempt))
    match config.run_with:
        case "torchrun":
            return isolated("trainyard_trainer.user_code.torchrun", *filled)
        case None:
            return filled
        case _:
            assert_never(config.run_with)


def placeholders(config: UserCode, attempt: int) -> dict[str, str]:
    """Return the values of the placeholders that a command's arguments may contain, such as `{workers}`."""
    workers = config.scaling.num_workers
    return {
        "workers": f"{workers}",
        "gpus": f"{workers if config.scaling.use_gpu else 0}",
        "storage": config.storage.uri,
        "run": config.name,
        "attempt": f"{attempt}",
    }


def program_text(config: UserCode, attempt: int) -> str:
    """Return the function or the command line of the run as one line of text."""
    if isinstance(config, FunctionConfig):
        return config.function
    filled = fill_command(config.command, placeholders(config, attempt))
    return shlex.join(filled if config.run_with is None else [config.run_with, *filled])


def environment_of(config: UserCode, attempt: int, files: Path | None) -> dict[str, str]:
    """Return the environment of the program.

    RAY_JOB_CONFIG_JSON_ENV_VAR in it holds the environment of the Ray workers. The variables of the run file
    are already in this process's environment, see `trainyard_trainer.environment`. `files` is the run's
    folder, if it is on a file system.
    """
    internal = (CODE_VARIABLE, submission.VARIABLE, submission.SOURCE_VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in internal}
    job = job_config(inherited)
    runtime_env = job.get("runtime_env") or {}
    job_variables = runtime_env.get("env_vars") or {}
    conditions: list[When] = ["always"]
    if not config.scaling.use_gpu:
        conditions.append("without GPUs")
    if not os.access(Path.home(), os.W_OK):
        conditions.append("read-only home")
    already_set = {**inherited, **job_variables}
    libraries = library_variables(conditions, already_set, {"tmp": tempfile.gettempdir()})
    worker_variables = {**libraries, **job_variables}
    if python_path := inherited.get("PYTHONPATH"):
        worker_variables["PYTHONPATH"] = python_path
    runtime_env = {**runtime_env, "env_vars": worker_variables}
    if isinstance(config, FunctionConfig):
        runtime_env["py_executable"] = shlex.join(python_with_code())
    elif config.run_with == "torchrun":
        runtime_env["py_executable"] = shlex.join(isolated_python())
    job["runtime_env"] = runtime_env
    libraries[JOB_CONFIG_VARIABLE] = json.dumps(job)
    if isinstance(config, CommandConfig) and config.library_hook and files is not None:
        hook = str(Path(library_hook.__file__).parent / "python_path")
        libraries["PYTHONPATH"] = os.pathsep.join(filter(None, (hook, python_path)))
        libraries[FOLDER_VARIABLE] = str(files)
    run_variables = {
        f"TRAINYARD_{name.upper()}": value for name, value in placeholders(config, attempt).items()
    }
    return {
        **inherited,
        **libraries,
        **run_variables,
        CONFIG_VARIABLE: config.model_dump_json(),
        "TRAINYARD_WORKER_FAILURES": f"{config.faults.worker_failures}",
        "TRAINYARD_REPLACEMENT_TIMEOUT_S": f"{config.faults.replacement_timeout_s}",
        "RAY_ADDRESS": address(),
        # `python` and `torchrun` must be those of the environment that has Ray.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
