"""The trainer, which runs in the container image: config -> data, model and training loop -> run folder.

User code imports the names of `__all__` from here. They are loaded when they are first used, so that
`trainyard_trainer.config` can be imported on a machine without torch and Ray.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing.TYPE_CHECKING`, without importing typing
if TYPE_CHECKING:
    from typing import Any

    from trainyard_trainer.config.section import Settings
    from trainyard_trainer.config.training.metric import Metric
    from trainyard_trainer.data.loading.batch import Batch
    from trainyard_trainer.recipes.example_inputs import ExampleInputs
    from trainyard_trainer.recipes.loss import Evaluation, Loss, Top
    from trainyard_trainer.recipes.random_numbers import random_numbers
    from trainyard_trainer.recipes.recipe import Networks, Recipe
    from trainyard_trainer.user_code.run_config import run_config

__all__ = [
    "Batch",
    "Evaluation",
    "ExampleInputs",
    "Loss",
    "Metric",
    "Networks",
    "Recipe",
    "Settings",
    "Top",
    "random_numbers",
    "run_config",
]

_MODULES = {
    "Batch": "trainyard_trainer.data.loading.batch",
    "Evaluation": "trainyard_trainer.recipes.loss",
    "ExampleInputs": "trainyard_trainer.recipes.example_inputs",
    "Loss": "trainyard_trainer.recipes.loss",
    "Metric": "trainyard_trainer.config.training.metric",
    "Networks": "trainyard_trainer.recipes.recipe",
    "Recipe": "trainyard_trainer.recipes.recipe",
    "Settings": "trainyard_trainer.config.section",
    "Top": "trainyard_trainer.recipes.loss",
    "random_numbers": "trainyard_trainer.recipes.random_numbers",
    "run_config": "trainyard_trainer.user_code.run_config",
}
"""The module of each name that is loaded when it is first used."""


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562)."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
