"""The built-in recipes, and how a run or a saved model finds its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.own_recipe import OwnRecipe
from trainyard_trainer.data.loading.rows import DataInfo
from trainyard_trainer.recipes.causal_lm.recipe import CausalLanguage
from trainyard_trainer.recipes.image_classification.recipe import Classification
from trainyard_trainer.recipes.language_model.recipe import Language
from trainyard_trainer.recipes.own import read_settings, recipe_class
from trainyard_trainer.recipes.recipe import Recipe

RECIPES: Mapping[str, type[Recipe[Any]]] = {
    "image_classification": Classification,
    "language_model": Language,
    "causal_lm": CausalLanguage,
}
"""By `train.recipe`."""


def recipe_of(run: TrainerConfig, info: DataInfo | None = None) -> Recipe[Any]:
    """Return the recipe of a run; `info` describes its data set, once that is prepared."""
    train = run.train
    if isinstance(train, OwnRecipe):
        recipe = recipe_class(train.recipe)
        return recipe(read_settings(recipe, train.model), info)
    return RECIPES[train.recipe].of_run(run, info)


def saved_recipe(name: str, model: Mapping[str, Any], info: DataInfo | None) -> Recipe[Any]:
    """Return the recipe of a saved model; `model` is its section `train.model` as JSON."""
    recipe = recipe_class(name) if ":" in name else RECIPES[name]
    return recipe(recipe.settings.model_validate(model), info)
