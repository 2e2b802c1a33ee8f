"""The command `recipe schema`: write the JSON Schema of the settings of the user's own recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.options import local_path


def schema(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", parser=local_path, help="The run file of the recipe.")
    ],
) -> None:
    """Write the JSON Schema of a recipe's settings beside its code, for checks without PyTorch."""
    from trainyard.errors import ConfigError
    from trainyard.local.tools import run_tool
    from trainyard.run_file.load import load_run
    from trainyard.run_file.models import OwnRecipeRun

    run = load_run(file, checks_settings=False)
    if not isinstance(run, OwnRecipeRun) or run.code is None:
        raise ConfigError(
            f"{file} has no recipe of your own with a folder of code",
            "Set train.recipe to module:Class, and code to the folder of the module.",
        )
    raise typer.Exit(run_tool("recipe_schema", ["--", run.code, run.train.recipe]))
