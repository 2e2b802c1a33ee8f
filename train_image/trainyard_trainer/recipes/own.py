"""Load a recipe of the user: import its class, and check the class and its settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trainyard_trainer.config.section import Section
from trainyard_trainer.config.training.recipes import OWN_METRICS
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.recipe import Recipe
from trainyard_trainer.user_import import import_reference, user_errors

BUILD = ("build_model", "(self)")
ONE_LOSS = ("loss", "(self, model, batch)")
LOSS_OF_EACH = ("network_loss", "(self, network, models, batch)")
"""The methods that recipes define, with their parameters: how the model is built, and the loss of the model
or of each of its networks."""


def recipe_class(name: str) -> type[Recipe[Any]]:
    """Import the recipe's class that `module:Class` names. Raises ConfigError if it is not a recipe."""
    with user_errors(f"train.recipe = {name}"):
        found = import_reference(name, "train.recipe")
    if not isinstance(found, type) or not issubclass(found, Recipe):
        raise ConfigError(
            f"train.recipe = {name}: this is not a subclass of trainyard_trainer.recipes.Recipe"
        )
    for method, parameters in (BUILD, LOSS_OF_EACH if found.networks else ONE_LOSS):
        wanted = inspect.signature(getattr(Recipe, method)).parameters
        defined = getattr(found, method)
        if defined is getattr(Recipe, method):
            raise ConfigError(f"train.recipe = {name} has no method {method}{parameters}")
        if len(inspect.signature(defined).parameters) != len(wanted):
            raise ConfigError(
                f"train.recipe = {name}: {method}{inspect.signature(defined)} has other parameters than "
                f"{method}{parameters} ({_place_of(defined)})"
            )
    OWN_METRICS[name] = found.metrics
    return found


def _place_of(function: Any) -> str:
    """Return the file and line where a function is defined."""
    _, line = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}, line {line}"


def read_settings(recipe: type[Recipe[Any]], model: Mapping[str, Any]) -> Section:
    """Validate `train.model` by the recipe's settings. Raises ConfigError with every problem."""
    try:
        return recipe.settings.model_validate(dict(model))
    except ValidationError as error:
        problems = [
            f"{'.'.join(['train.model', *map(str, each['loc'])])} = {each['input']!r}: {each['msg']}"
            for each in error.errors()
        ]
        keys = ", ".join(recipe.settings.model_fields) or "no keys"
        raise ConfigError(
            "\n       ".join(problems) + f"\n       {recipe.__name__} has the settings: {keys}"
        ) from None
