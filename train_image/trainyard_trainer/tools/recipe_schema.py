"""Write the JSON Schema of the settings of a user's recipe into the folder of its code.

python -m trainyard_trainer.tools.recipe_schema CODE RECIPE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainyard_trainer.config.tools.run_tools import RECIPE_SCHEMA
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.own import recipe_class
from trainyard_trainer.run_files.programs import code_imports
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.run_files.recipe_schema import schema_file
from trainyard_trainer.tools.command_line import exit_code_of, parse


def write_schema(code: Path, recipe: str) -> Path:
    """Import the recipe from the folder, and write the schema of its settings. Return the path of the file.

    Raises ConfigError if it is no recipe, or if the file cannot be written.
    """
    code_imports.install([str(code)])
    schema = recipe_class(recipe).settings.model_json_schema()
    file = code / schema_file(recipe)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(schema, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    return file


def main(arguments: list[str] | None = None) -> int:
    _, wanted = parse(arguments, RECIPE_SCHEMA)

    def run() -> int:
        print(f"{write_schema(Path(wanted.code), wanted.recipe)} is written")
        return 0

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(main))
