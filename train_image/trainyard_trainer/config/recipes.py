"""The registry of recipes: the values of `train.recipe`, and the model of each `train` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from trainyard_trainer.config.boosting import Boosting
from trainyard_trainer.config.train import ImageClassification, LanguageModel, Train


def recipe_named(train: Any) -> str:
    """The recipe that a `train` section names, read or not; without a name that of images."""
    if isinstance(train, Train | Boosting):
        return train.recipe
    named = train.get("recipe") if isinstance(train, Mapping) else None
    return "image_classification" if named is None else str(named)


AnyTrain = Annotated[
    Annotated[ImageClassification, Tag("image_classification")]
    | Annotated[LanguageModel, Tag("language_model")],
    Discriminator(recipe_named),
]
"""A recipe that trains a network, and its settings."""

RECIPE_MODELS: tuple[type[Train] | type[Boosting], ...] = (
    ImageClassification,
    LanguageModel,
    Boosting,
)
"""The registry of recipes: the model of the `train` section of each."""


def recipe_of(model: type[Train] | type[Boosting]) -> str:
    """Return the value of `train.recipe` that selects a model of the registry."""
    (name,) = get_args(model.model_fields["recipe"].annotation)
    return str(name)


RECIPES = tuple(recipe_of(model) for model in RECIPE_MODELS)
"""The values that `train.recipe` can have."""

BOOSTING = recipe_of(Boosting)
"""The recipe without a network. Its runs have other `data`, `train` and `checkpoint` sections."""
