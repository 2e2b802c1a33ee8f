"""What a run learns: all that differs between an image and a text is behind these two interfaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainyard_trainer.config.train import Train
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.image_classification.recipe import Classification
from trainyard_trainer.recipes.language_model.recipe import Language
from trainyard_trainer.recipes.recipe import Recipe
from trainyard_trainer.run_folder.progress import MetricsRecord

if TYPE_CHECKING:
    pass


RECIPES: Mapping[str, Recipe] = {
    "image_classification": Classification(),
    "language_model": Language(),
}
"""By `train.recipe`."""


def recipe_of(train: Train) -> Recipe:
    return RECIPES[train.recipe]


def speeds_in(
    config: TrainerConfig, report: MetricsRecord, worker: Worker | None
) -> dict[str, float]:
    """A report's speed in the recipe's own units."""
    return recipe_of(config.train).speeds(config.train.model, report.samples_per_s, worker)
