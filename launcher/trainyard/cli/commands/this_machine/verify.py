"""The command `verify`: check on this machine that a recipe may be trusted to the engine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Optional

import typer

from trainyard.cli.options import RunFile, Settings, load_run_with_options
from trainyard.cli.tools import parameter
from trainyard_trainer.config.tools.run_tools import STEPS
from trainyard_trainer.config.tools.shared_arguments import JSON


def verify(
    run_file: RunFile,
    settings: Settings = None,
    steps: Annotated[Optional[str], parameter(STEPS)] = None,
    as_json: Annotated[bool, parameter(JSON)] = False,
) -> None:
    """Check that a recipe trains the same bits after a kill, and the same with any number of workers."""
    from trainyard.errors import ConfigError
    from trainyard.local.tools import run_tool
    from trainyard.local.training import local_config, variables_of
    from trainyard.planning.objects import pack_code
    from trainyard.run_file.models import NetworkRun

    run = load_run_with_options(run_file, settings, None, None, None)
    if not isinstance(run, NetworkRun):
        raise ConfigError(f"run {run.name} has no recipe that trains a network")
    options = [*([f"--steps={steps}"] if steps else []), *(["--json"] if as_json else [])]
    with TemporaryDirectory() as scratch:
        code = pack_code(run, None)
        config = local_config(run, Path(scratch), 1, "alone", code)
        exit_code = run_tool("verify", options, variables_of(config, code))
    raise typer.Exit(exit_code)
