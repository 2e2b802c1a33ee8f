"""Explain an error of the user's recipe on a worker: in which of its files and lines it was raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.own_recipe import OwnRecipe
from trainyard_trainer.errors import RecipeError, RunError, TrainerError
from trainyard_trainer.user_import import described, place_in_user_code

MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, TypeError, ValueError),
)
"""Errors of a program that a repetition of the same step raises again. A RuntimeError may be one of PyTorch's
communication, which a restart of the workers can cure."""


@contextmanager
def recipe_errors_explained(config: TrainerConfig) -> Iterator[None]:
    """Raise RecipeError or RunError in place of an error that was raised in the user's recipe."""
    try:
        yield
    except (TrainerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not isinstance(config.train, OwnRecipe) or place_in_user_code(error) is None:
            raise
        kind = RecipeError if isinstance(error, MISTAKES) else RunError
        raise kind(f"train.recipe = {config.train.recipe} failed: {described(error)}") from error
