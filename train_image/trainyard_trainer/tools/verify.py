"""Check on this machine that a run's recipe keeps the engine's guarantees, such as exact resume.

TRAINYARD_CONFIG=... python -m trainyard_trainer.tools.verify [--steps N] [--json]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from trainyard_trainer.attempt.attempt import open_data, with_absolute_path
from trainyard_trainer.attempt.checks import check, try_own_recipe
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.tools.run_tools import VERIFY
from trainyard_trainer.config.trainer_config import TrainerConfig, code_of, read_config
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files import exit_codes
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.command_line import exit_code_of, parse
from trainyard_trainer.tools.verification.checks import CheckResult, Verification
from trainyard_trainer.tools.verification.trials import FEWEST_STEPS, Bench

CHECK_WIDTH, RESULT_WIDTH = 24, 15
"""The widths of the table's first columns, in characters."""


def verify(
    config: TrainerConfig, *, steps: int, environment: Mapping[str, str] = os.environ
) -> Iterable[CheckResult]:
    """Check the recipe of a run in a temporary folder. Raises ConfigError if it cannot train at all."""
    config = with_absolute_path(config)
    if code := code_of(config):
        # A large archive lies in the run's folder, where the launcher has put it.
        folder = RunFolder.open(config.storage.path, config.name)
        code_archive.make_importable(folder, code, environment)
    with tempfile.TemporaryDirectory(prefix="trainyard-verify-") as scratch:
        own = config.model_copy(
            update={"storage": Storage(path=scratch, endpoint=config.storage.endpoint)}
        )
        folder = RunFolder.open(scratch, own.name)
        check(own)
        data = open_data(own, folder)
        try_own_recipe(own, data)
        bench = Bench(config=own, data=data, steps=steps, folder=scratch)
        if bench.length.steps_per_epoch < FEWEST_STEPS:
            raise ConfigError(
                f"the data has {data.num_train} training samples, and {FEWEST_STEPS} steps need more than "
                f"{bench.batch_size * (FEWEST_STEPS - 1)}"
            )
        yield from Verification(bench).results()


def line_of(result: CheckResult) -> str:
    """Return the lines of the table for a check."""
    row = f"{result.check:<{CHECK_WIDTH}}{result.result:<{RESULT_WIDTH}}{result.numbers}"
    return "\n".join([row, *(f"    {line}" for line in result.details)])


def main(arguments: list[str] | None = None) -> int:
    _, wanted = parse(arguments, VERIFY)
    return exit_code_of(lambda: _run(wanted.steps, as_json=wanted.json))


def _run(steps: int, *, as_json: bool) -> int:
    config = read_config()
    if not isinstance(config, TrainerConfig):
        raise ConfigError(f"run {config.name} has no recipe that trains a network")
    results = []
    for result in verify(config, steps=steps):
        results.append(result)
        if not as_json:
            print(line_of(result), flush=True)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    has_failed = any(result.result == "FAILED" for result in results)
    return exit_codes.FAILED if has_failed else 0


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(main))
