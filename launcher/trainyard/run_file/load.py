"""Load a run file, or a mapping with the same keys, with the changes of the command line applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard.errors import ConfigError
from trainyard.run_file.credentials import refuse_credentials
from trainyard.run_file.models import RUN_MODELS, OwnRecipeRun, RecipeRun, RunConfig, RunWithCode
from trainyard.run_file.overrides import assign, parse_amount, parse_overrides
from trainyard.run_file.recipe_settings import check_settings
from trainyard.run_file.validation import check_name, shown_value, validate
from trainyard.run_file.values import refuse_untransportable
from trainyard.run_file.yaml_text import read_yaml
from trainyard_trainer.config.trainer_config import kinds_of

STANDING_CLUSTER = "trainyard"
"""The name of the standing RayCluster that the chart creates."""

MAPPING = "the mapping"
"""The name in error messages of a run that was given as a mapping instead of a file."""


def load_run(
    source: Path | str | Mapping[str, Any],
    settings: Sequence[str] = (),
    *,
    gpus: int | str | None = None,
    workers: int | str | None = None,
    name: str | None = None,
    warm: bool = False,
    checks_settings: bool = True,
) -> RunConfig:
    """Load a run from a file, or from a mapping with the keys of a run file.

    `settings` such as `train.epochs=3`, `gpus`, `workers` (a number, or `8:16`) and `name` change it, in
    this order. `warm` chooses the platform's standing RayCluster. Relative paths are resolved against the
    file's folder, or against the current folder for a mapping. `checks_settings` is for the settings of the
    user's own recipe, if there is a schema of them.
    Raises ConfigError with every problem: path, value, rule, and the nearest valid key.
    """
    if isinstance(source, Mapping):
        document, folder, title = _as_in_a_file(source), Path.cwd(), MAPPING
    else:
        document, folder, title = read_yaml(Path(source)), Path(source).parent, str(source)
    for keys, value in parse_overrides(settings):
        assign(document, keys, value)
    if gpus is not None and workers is not None:
        raise ConfigError("--gpus and --workers exclude each other: one worker starts per GPU")
    for resource, amount, other in (("gpus", gpus, "workers"), ("workers", workers, "gpus")):
        if amount is not None:
            assign(document, ["resources", resource], parse_amount(str(amount)))
            document["resources"].pop(other, None)
    if name is not None:
        document["name"] = name
    if warm:
        assign(document, ["resources", "cluster"], STANDING_CLUSTER)
    refuse_untransportable(document, title)
    # Credentials are refused before validation, whose messages would show them.
    refuse_credentials(document, title)
    run = validate(_model_for(document, title), document, title)
    if isinstance(run, RunWithCode) and run.code is not None:
        run = run.model_copy(update={"code": _absolute(folder, run.code)})
    if isinstance(run, OwnRecipeRun) and checks_settings:
        check_settings(run)
    return run


def load_name(path: Path) -> str:
    """Return the name of a file's run without validating the rest of the file. Raises ConfigError."""
    return check_name(read_yaml(path).get("name"), f"{path}: name")


def _absolute(folder: Path, code: str) -> str:
    try:
        return str((folder / code).resolve())
    except (RuntimeError, ValueError) as error:  # a cycle of symbolic links, or a NUL character
        raise ConfigError(f"code = {shown_value(code)} is not a valid path: {error}") from None


def _as_in_a_file(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as a file with the same keys would be read, so that the same rules hold for both.

    Raises ConfigError for values that a run file cannot hold.
    """
    plain = _plain(mapping)
    refuse_untransportable(plain, MAPPING)
    document: dict[str, Any] = plain
    return document


def _plain(value: Any) -> Any:
    """Return a copy of a value with mappings as dicts and tuples as lists, as YAML would give them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _model_for(document: dict[str, Any], source: str) -> type[RunConfig]:
    """Return the model for the kind of run that a document describes.

    A document without any of the keys `train`, `command` and `function` is validated as a recipe's, because
    most run files have a recipe. Raises ConfigError for a document with several of them.
    """
    kinds = kinds_of(document)
    if len(kinds) > 1:
        keys = [key for key in ("train", "command", "function") if key in document]
        raise ConfigError(
            f"{source} has {' and '.join(keys)}: a run has exactly one of a built-in recipe (train), a "
            "program (command) and a training function (function)",
            "Remove all but one.",
        )
    return RUN_MODELS[kinds[0]] if kinds else RecipeRun
