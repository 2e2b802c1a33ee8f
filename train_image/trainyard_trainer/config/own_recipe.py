"""The sections `train` and `data` of a run with the user's own recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trainyard_trainer.config.data import Loading
from trainyard_trainer.config.optimizers import AdamW, Optimizer
from trainyard_trainer.config.train import Train
from trainyard_trainer.config.user_code import Reference

OWN_RECIPE = "own_recipe"
"""The kind of a run with the user's own recipe."""


class OwnRecipe(Train):
    """A recipe of the user: a class in the folder that `code` names."""

    recipe: Reference
    """The recipe's class as `module:Class`: a subclass of `trainyard_trainer.recipes.Recipe`."""

    model: dict[str, Any] = Field(default_factory=dict)
    """The settings of the recipe, which its class `Settings` validates."""

    optimizer: Optimizer = AdamW(name="adamw")


class OwnData(Loading):
    """A data set of the user, which is made by a function or class in the folder that `code` names."""

    dataset: Reference
    """The function or class as `module:name`. It is called once with `split="train"` and once with
    `split="valid"`, and returns an object with `__len__` and `__getitem__`, whose samples are mappings of
    column names to tensors, arrays or numbers."""

    loader: Literal["torch"] = "torch"
    """The loader that makes the batches: a PyTorch DataLoader in each worker."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, by name."""
