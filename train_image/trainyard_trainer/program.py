"""The program of a driver: one attempt at the run that `TRAINYARD_CONFIG` describes.

Exit codes: 0 succeeded, 1 failed, 2 the config asks for something that cannot be.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Mapping

from pydantic import ValidationError

from trainyard_trainer import front_end
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    AnyConfig,
    BoostingConfig,
    UserCodeConfig,
    read_config,
)
from trainyard_trainer.environment import keep_from_workers, ray_job_of, set_variables
from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.notices.reporting import reported_end
from trainyard_trainer.on_ray import leaving
from trainyard_trainer.retrying import End, with_retries
from trainyard_trainer.run_files import exit_codes, submission
from trainyard_trainer.run_files.driver_output import FINAL_FAILURE, record_line
from trainyard_trainer.run_files.standing_cluster import RETRIES_VARIABLE, line_prefix
from trainyard_trainer.run_folder import final_failure
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.stop_signals import Leaving
from trainyard_trainer.run_folder.submission_names import is_on_standing_cluster, submission_of

NOTICE_S = 3.0
"""Seconds that an attached launcher has to cancel the retries after an error that a retry cannot cure."""

DRIVER_VARIABLES = (
    CONFIG_VARIABLE,
    CODE_VARIABLE,
    submission.VARIABLE,
    submission.SOURCE_VARIABLE,
)
"""Variables that only the driver reads. On a standing cluster Ray would give them to all workers."""

LOG_VARIABLE = "TRAINYARD_LOG"
"""Names a file that gets a copy of the driver's output."""


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainyard_trainer", allow_abbrev=False)
    parser.add_argument(
        "--without-ray",
        action="store_true",
        help="train in this process alone, or in those that torchrun has started",
    )
    wanted = parser.parse_args(arguments)
    if RETRIES_VARIABLE in environment:
        return with_retries(
            lambda: attempt(environment, without_ray=wanted.without_ray),
            retries=int(environment[RETRIES_VARIABLE]),
        )
    return attempt(environment, without_ray=wanted.without_ray).exit_code


def attempt(environment: Mapping[str, str], *, without_ray: bool) -> End:
    """Run one attempt to its end, print its error, and return how it has ended."""
    front_end.watch(front_end.terminate)
    leave = leaving.heeded(environment.get(leaving.VARIABLE))
    job = ray_job_of(environment) if is_on_standing_cluster(environment) else None
    prefix = line_prefix(job) if job else ""
    with leave, Output(environment.get(LOG_VARIABLE), prefix=prefix) as output:
        keep_from_workers(DRIVER_VARIABLES)
        try:
            config = _config(environment)
            set_variables(config.env)
            with reported_end(config, environment):
                run_attempt(config, output, environment, without_ray=without_ray)
        except Leaving as error:
            print(error, flush=True)
            raise
        except TrainerError as error:
            front_end.print_error(f"error: {error}")
            if error.is_final:
                tell_final_failure(error, environment)
            return End(exit_code=error.exit_code, is_final=error.is_final)
        except Exception:  # noqa: BLE001 - the outermost handler
            traceback.print_exc()
            return End(exit_code=exit_codes.FAILED)
    return End(exit_code=exit_codes.SUCCEEDED)


def run_attempt(
    config: AnyConfig, output: Output, environment: Mapping[str, str], *, without_ray: bool
) -> None:
    """Run one attempt to its end. Raises TrainerError."""
    raise_final_failure_again(config, environment)
    # Only now: torch and Ray take seconds, and a wrong config needs neither.
    if isinstance(config, UserCodeConfig):
        if without_ray:
            raise ConfigError("--without-ray is for built-in recipes: own code runs alone")
        from trainyard_trainer.user_code import command

        command.run(config, output)
    elif isinstance(config, BoostingConfig):
        from trainyard_trainer.boosting import attempt

        attempt.run(config, output, environment, without_ray=without_ray)
    elif without_ray:
        from trainyard_trainer.attempt import without_ray as alone

        alone.run(config, output, environment)
    else:
        from trainyard_trainer.on_ray.local_ray import forked_workers

        # The process that forks workers imports PyTorch while this process does, too.
        forked_workers.start(config.env, use_gpu=config.scaling.use_gpu)
        from trainyard_trainer.on_ray import driver

        driver.run(config, output)


def raise_final_failure_again(config: AnyConfig, environment: Mapping[str, str]) -> None:
    """Raise RepeatedFailure if an earlier attempt has failed in a way that a retry cannot cure."""
    storage = config.storage.absolute()
    folder = RunFolder.open(storage.path, config.name, storage.endpoint)
    final_failure.raise_again(folder, environment)


def tell_final_failure(error: TrainerError, environment: Mapping[str, str]) -> None:
    """Tell the launcher that a retry is of no use, and give it time to cancel the retries.

    KubeRay starts the next attempt within seconds after this process has ended.
    """
    if submission_of(environment) is not None and not is_on_standing_cluster(environment):
        print(record_line(FINAL_FAILURE, {"exit_code": error.exit_code}), flush=True)
        time.sleep(NOTICE_S)


def _config(environment: Mapping[str, str]) -> AnyConfig:
    """Read the config from the environment. Raises ConfigError if it is missing or invalid."""
    try:
        return read_config(environment)
    except KeyError:
        raise ConfigError(
            f"{CONFIG_VARIABLE} is not set: it holds the run's config as JSON.\n"
            "       `trainyard train RUN.yaml` and `trainyard submit RUN.yaml` set it."
        ) from None
    except ValidationError as error:
        problems = "".join(
            f"\n       {'.'.join(map(str, problem['loc'])) or 'config'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(f"{CONFIG_VARIABLE} is not a valid config:{problems}") from None
