"""The registry of recipes: the values of `train.recipe`, and the model of each `train` section."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from trainyard_trainer.config.training.boosting import OBJECTIVE_METRICS, Boosting
from trainyard_trainer.config.training.metric import Metric, ValidationGoal, goals_of
from trainyard_trainer.config.training.train import (
    CausalLm,
    ImageClassification,
    LanguageModel,
    Train,
)


def recipe_named(train: Any) -> str:
    """The recipe that a `train` section names, read or not; without a name that of images."""
    if isinstance(train, Train | Boosting):
        return train.recipe
    named = train.get("recipe") if isinstance(train, Mapping) else None
    return "image_classification" if named is None else str(named)


AnyTrain = Annotated[
    Annotated[ImageClassification, Tag("image_classification")]
    | Annotated[LanguageModel, Tag("language_model")]
    | Annotated[CausalLm, Tag("causal_lm")],
    Discriminator(recipe_named),
]
"""A recipe that trains a network, and its settings."""

RECIPE_MODELS: tuple[type[Train] | type[Boosting], ...] = (
    ImageClassification,
    LanguageModel,
    CausalLm,
    Boosting,
)
"""The registry of recipes: the model of the `train` section of each."""


def recipe_of(model: type[Train] | type[Boosting]) -> str:
    """Return the value of `train.recipe` that selects a model of the registry."""
    (name,) = get_args(model.model_fields["recipe"].annotation)
    return str(name)


RECIPES = tuple(recipe_of(model) for model in RECIPE_MODELS)
"""The values that `train.recipe` can have."""

MODELS: Mapping[str, type[Train] | type[Boosting]] = {
    recipe_of(model): model for model in RECIPE_MODELS
}
"""The models of the registry by `train.recipe`."""

BOOSTING = recipe_of(Boosting)
"""The recipe without a network. Its runs have other `data`, `train` and `checkpoint` sections."""


CAUSAL_LM = recipe_of(CausalLm)
"""The recipe that fine-tunes language models of Transformers, whose models are exported as folders."""


OWN_METRICS: dict[str, tuple[Metric, ...]] = {}
"""The metrics of the user's recipes that this process has imported, by `train.recipe`."""


def metrics_of(train: Any) -> tuple[Metric, ...]:
    """Return the metrics of the recipe that a `train` section names, read or as JSON.

    Those of a recipe of the user are known once its class has been imported.
    """
    if ":" in recipe_named(train):
        return OWN_METRICS[recipe_named(train)]
    model = MODELS[recipe_named(train)]
    if not issubclass(model, Boosting):
        return model.metrics_of(train)
    return OBJECTIVE_METRICS[train.objective if isinstance(train, Boosting) else train["objective"]]


def best_goal(train: Any, best: str | None) -> ValidationGoal:
    """Return what the best checkpoint is chosen by; `best` is `checkpoint.best`, None if it is not set."""
    goals = goals_of(metrics_of(train))
    return goals[best] if best is not None else next(iter(goals.values()))


BUILT_IN_METRICS = tuple(
    {
        metric.name: metric
        for model in RECIPE_MODELS
        for metric in (
            chain(*OBJECTIVE_METRICS.values()) if issubclass(model, Boosting) else model.metrics
        )
    }.values()
)
"""The metrics of all built-in recipes, each once."""
