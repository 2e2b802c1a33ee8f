"""`python -m trainyard_trainer [--without-ray]`: one attempt at the run that `TRAINYARD_CONFIG` describes.

Exit codes: 0 succeeded, 1 failed, 2 the config asks for something that cannot be.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping

from pydantic import ValidationError

from trainyard_trainer import front_end
from trainyard_trainer.config.trainer_config import (
    CONFIG_VARIABLE,
    AnyConfig,
    BoostingConfig,
    UserCodeConfig,
    read_config,
)
from trainyard_trainer.environment import set_variables
from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.notices.reporting import reported_end
from trainyard_trainer.on_ray import leaving
from trainyard_trainer.run_files.driver_output import FINAL_FAILURE, record_line
from trainyard_trainer.run_folder import final_failure
from trainyard_trainer.run_folder.attempt_scope import Leaving
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output

NOTICE_S = 3.0
"""Seconds that an attached launcher has to cancel the retries after an error that a retry cannot cure."""

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
    front_end.watch(front_end.terminate)
    leave = leaving.heeded(environment.get(leaving.VARIABLE))
    with leave, Output(environment.get(LOG_VARIABLE)) as output:
        try:
            config = _config(environment)
            set_variables(config.env)
            with reported_end(config, environment):
                run_attempt(config, output, environment, without_ray=wanted.without_ray)
        except Leaving as error:
            print(error, flush=True)
            raise
        except TrainerError as error:
            front_end.print_error(f"error: {error}")
            if error.is_final:
                tell_final_failure(error, environment)
            return error.exit_code
        except Exception:  # noqa: BLE001 - the outermost handler
            traceback.print_exc()
            return 1
    return 0


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
    if final_failure.submission_of(environment) is not None:
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


if __name__ == "__main__":
    sys.exit(main())
