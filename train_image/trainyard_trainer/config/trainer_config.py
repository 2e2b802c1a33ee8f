"""The config of an attempt: the sections of a run file that the trainer reads, and the numbers of the plan.

The launcher validates it before a run is submitted, so that a mistake is found before the run waits for a
queue and an image. Hence it needs only pydantic and the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import from_json
from typing_extensions import Self

from trainyard_trainer.config.checkpoint import BoostingCheckpoint, CheckpointConfig
from trainyard_trainer.config.data.section import Data, Loading, Table
from trainyard_trainer.config.limits import Limits
from trainyard_trainer.config.notify import Notify
from trainyard_trainer.config.scaling import Faults, Scaling
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.training.boosting import Boosting, require_boosting_fit
from trainyard_trainer.config.training.own_recipe import OWN_RECIPE, OwnData, OwnRecipe
from trainyard_trainer.config.training.recipes import BOOSTING, AnyTrain, recipe_named
from trainyard_trainer.config.training.train import Train, require_fit, require_one_size
from trainyard_trainer.config.user_code import Command, Reference, RunWith
from trainyard_trainer.config.variables import Secrets, Variables

CONFIG_VARIABLE = "TRAINYARD_CONFIG"
"""The environment variable that carries a run's config as JSON to the driver."""

CODE_VARIABLE = "TRAINYARD_CODE"
"""The one that carries the code of a run: a tar.gz in base64."""

RUN_NAME_LIMIT = 38
"""Longest run name: a RayJob's 47 characters less `-` and 8 of the hash."""

RunName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z]([a-z0-9-]*[a-z0-9])?$", min_length=1, max_length=RUN_NAME_LIMIT
    ),
]


class AttemptConfig(Section):
    """What every attempt needs to know; travels as JSON in `TRAINYARD_CONFIG`."""

    name: RunName
    """The run: its identity, and its folder below the storage path."""

    faults: Faults = Faults()
    """How many failures it survives."""

    limits: Limits = Limits()
    """How long it may take."""

    scaling: Scaling
    """The numbers of the plan."""

    storage: Storage
    """Where its folder lies."""

    env: Variables = Field(default_factory=dict)
    """Environment variables of the driver and of all Ray workers."""

    secrets: Secrets = Field(default_factory=dict)
    """Further ones, which these processes already have: where the values come from, never the values."""

    notify: Notify | None = None
    """Who is told when the run has ended."""


class TrainerConfig(AttemptConfig):
    """The config of an attempt at a recipe that trains a network."""

    data: Loading
    """The data set, and how batches are made of it."""

    train: Train
    """The recipe and how it is trained."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""

    @model_validator(mode="after")
    def _has_a_possible_size(self) -> Self:
        require_one_size(self.train, "scaling.num_workers", is_elastic=self.scaling.is_elastic)
        return self


class BuiltInConfig(TrainerConfig):
    """The config of an attempt at a built-in recipe that trains a network."""

    data: Data
    """What to train on."""

    train: AnyTrain
    """The recipe."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> BuiltInConfig:
        require_fit(self.data, self.train, self.checkpoint)
        return self


class OwnRecipeConfig(TrainerConfig):
    """The config of an attempt at a recipe of the user."""

    data: OwnData
    """What to train on."""

    train: OwnRecipe
    """The recipe."""

    code_sha256: str | None = None
    """The SHA-256 of the archive with the user's code. None: its modules are installed in the image."""


class BoostingConfig(AttemptConfig):
    """The config of an attempt at a run of the recipe `gradient_boosting`."""

    data: Table
    """What to train on."""

    train: Boosting
    """The trees."""

    checkpoint: BoostingCheckpoint = BoostingCheckpoint()
    """When the run is saved."""

    @model_validator(mode="after")
    def _sections_fit(self) -> BoostingConfig:
        require_boosting_fit(self.data, self.train, self.checkpoint)
        return self


class UserCodeConfig(AttemptConfig):
    """An attempt of a run with the user's code."""

    code_sha256: str | None = None
    """The SHA-256 of the archive with the code, in whose folder the program runs. None: there is no
    archive."""


class CommandConfig(UserCodeConfig):
    """An attempt of a run whose program is the user's."""

    command: Command
    """The program and its arguments."""

    run_with: RunWith | None = None
    """The program that starts the command once for each worker. None: the command is started once."""

    library_hook: bool = True
    """Whether Transformers, TRL and Lightning resume by themselves and write into the run's folder."""


class FunctionConfig(UserCodeConfig):
    """An attempt of a run whose training function is the user's."""

    function: Reference
    """The function that each Ray Train worker calls, as `module:callable`."""

    train_loop_config: dict[str, Any] = Field(default_factory=dict)
    """The argument of that function."""

    datasets: dict[str, str] = Field(default_factory=dict)
    """The paths of the Parquet files that Ray Data gives to the workers, by name."""


RecipeConfig = TrainerConfig | BoostingConfig
"""The config of an attempt at a recipe."""

AnyConfig = TrainerConfig | BoostingConfig | CommandConfig | FunctionConfig


def code_of(config: AnyConfig) -> str | None:
    """Return the SHA-256 of the archive with the user's code; None without one."""
    if isinstance(config, OwnRecipeConfig | UserCodeConfig):
        return config.code_sha256
    return None


KINDS: Mapping[str, type[AnyConfig]] = {
    "train": BuiltInConfig,
    OWN_RECIPE: OwnRecipeConfig,
    BOOSTING: BoostingConfig,
    "command": CommandConfig,
    "function": FunctionConfig,
}
"""Of an attempt, by what `kinds_of` says."""


def kinds_of(document: Mapping[str, Any]) -> list[str]:
    """What a run file or a config says is run: the keys among `train`, `command` and `function`, of which
    there should be one; `train` of another shape by its recipe."""
    kinds = [key for key in ("train", "command", "function") if key in document]
    return [_kind_of_recipe(document["train"]) if kind == "train" else kind for kind in kinds]


def _kind_of_recipe(train: Any) -> str:
    """Return the kind of a run with a section `train`."""
    name = recipe_named(train)
    if name == BOOSTING:
        return BOOSTING
    return OWN_RECIPE if ":" in name else "train"


def read_config(
    environment: Mapping[str, str] = os.environ,
) -> AnyConfig:
    """The config of this attempt, from `TRAINYARD_CONFIG`. Raises KeyError or pydantic's ValidationError."""
    text = environment[CONFIG_VARIABLE]
    try:
        document = from_json(text)
    except ValueError:
        document = None  # the model says what is wrong with it
    kinds = kinds_of(document) if isinstance(document, dict) else []
    return KINDS[(kinds or ["train"])[0]].model_validate_json(text)
