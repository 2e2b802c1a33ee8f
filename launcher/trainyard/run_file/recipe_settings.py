"""Check `train.model` of a run with the user's own recipe, if its code folder has a schema of the settings.

`trainyard recipe schema` writes the schema, and the file says where (`schema_file`). The training program
validates the same settings with the recipe's class before any worker starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.errors import ConfigError
from trainyard.run_file.models import OwnRecipeRun
from trainyard.run_file.validation import shown_value, unknown_key
from trainyard_trainer.run_files.recipe_schema import schema_file

if TYPE_CHECKING:
    import jsonschema


def check_settings(run: OwnRecipeRun) -> None:
    """Raise ConfigError with every problem of the settings. Without a schema nothing is checked."""
    if run.code is None:
        return
    file = Path(run.code) / schema_file(run.train.recipe)
    if not file.is_file():
        return
    validator = _validator_of(file)
    errors = sorted(validator.iter_errors(run.train.model), key=lambda each: each.json_path)
    problems = [line for error in errors for line in _lines_of(error)]
    if problems:
        raise ConfigError(
            f"train.model does not fit the settings of {run.train.recipe} in {file.name}",
            *problems,
            "If the recipe has changed since, write the file again with `trainyard recipe schema`.",
        )


def _validator_of(file: Path) -> jsonschema.Draft202012Validator:
    import jsonschema  # takes a tenth of a second, which other runs need not wait for

    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
    except (ValueError, jsonschema.SchemaError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{file} is no JSON Schema: {reason}",
            "Write it again with `trainyard recipe schema`, or delete it.",
        ) from None
    return jsonschema.Draft202012Validator(schema)


def _lines_of(error: jsonschema.ValidationError) -> Iterator[str]:
    """Describe an error: path, value and rule. Each unknown and each missing key has a line of its own."""
    path = ".".join(["train.model", *map(str, error.absolute_path)])
    known: Any = error.schema.get("properties", {})
    match error.validator:
        case "additionalProperties":
            for key in error.instance:
                if key not in known:
                    yield unknown_key(f"{path}.{key}", key, known)
        case "required":
            (key,) = (key for key in error.validator_value if repr(key) in error.message)
            yield f"{path}.{key}: is required"
        case _:
            rule = error.message.removeprefix(f"{error.instance!r} ")
            yield f"{path} = {shown_value(error.instance)}: {rule}"
