"""What a run asks of the training program: the sections of a run file that the trainer reads.

The launcher checks them on the laptop, so that a typo fails there and not after the queue and the
image pull; hence this package needs pydantic and the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import from_json

from trainyard_trainer.config.boosting import Boosting, require_boosting_fit
from trainyard_trainer.config.checkpoint import BoostingCheckpoint, Checkpoint
from trainyard_trainer.config.data import Data, Table
from trainyard_trainer.config.section import PositiveNumber, Section
from trainyard_trainer.config.train import (
    ImageClassification,
    LanguageModel,
    Train,
    require_fit,
    require_one_size,
)
from trainyard_trainer.config.user_code import Command, Function, RunWith

CONFIG_VARIABLE = "TRAINYARD_CONFIG"
"""The environment variable that carries a run's config as JSON to the driver."""

CODE_VARIABLE = "TRAINYARD_CODE"
"""The one that carries the code of a run: a tar.gz in base64."""

RUN_NAME_LIMIT = 38
"""Longest run name: a RayJob's 47 characters less `-` and 8 of the hash."""

DATA_LABELS = {"trainyard.io/nodes": "data"}
"""Ray labels of the nodes that a run has for its Ray loader alone."""

WORKER_RESOURCE = "trainyard_worker"
"""Counts the places for workers on a Ray node, where its CPUs alone would say something else."""

DATA_CPUS = 1
"""Logical CPUs beside the workers: without one, Ray Data waits for ever for a place to read."""

RunName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z]([a-z0-9-]*[a-z0-9])?$", min_length=1, max_length=RUN_NAME_LIMIT
    ),
]

MAY_CHANGE = {
    "data": {"decode_workers", "endpoint", "max_bad_samples", "ray_nodes"},
    "train": {"channels_last", "compile", "epochs", "micro_batch_size", "rounds"},
}
"""Keys of the sections that make a run's identity, but do not belong to it themselves. Those of LENGTHS may
only be raised. The number of workers belongs to it, too, where `has_fixed_workers`."""

LENGTHS = ("epochs", "rounds")
"""Keys of `train` that say how long a recipe trains; each recipe has one of them."""


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the weights, of a recipe's run.json; the rest may change between attempts."""
    return {
        section: {key: value for key, value in config[section].items() if key not in free}
        for section, free in MAY_CHANGE.items()
    }


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


class Faults(Section):
    """How many failures a run survives."""

    worker_failures: NonNegativeInt = 3
    """Restarts of the worker group inside one attempt (Ray Train's `max_failures`)."""

    retries: NonNegativeInt = 2
    """New attempts on a new cluster after a failed one (RayJob's `backoffLimit`)."""

    collective_timeout_s: PositiveNumber = 900.0
    """How many seconds workers wait for each other, or for a sign of life of one, before they start over."""

    replacement_timeout_s: Annotated[PositiveNumber, Field(ge=5)] = 1800.0
    """How many seconds a run waits for a place for workers that were lost, before its next attempt starts on
    a new cluster. Longer than it takes to get a node; below 30 only where the platform keeps attempts apart
    (`job.separateAttempts`), as Kubernetes would put the new pods on the lost node."""


class Scaling(Section):
    """The numbers of the plan that the trainer needs."""

    num_workers: PositiveInt
    """Ray Train workers; of an elastic run the most."""

    min_workers: PositiveInt | None = None
    """Of an elastic run the fewest."""

    workers_per_node: PositiveInt = 1
    """Workers that an elastic run wins or loses together."""

    use_gpu: bool
    """Give each worker one GPU."""

    cpus_per_worker: PositiveInt
    """Logical CPUs of one worker, and its threads."""

    has_worker_places: bool = False
    """Nodes count places for workers as a resource of their own, and each worker takes one."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with fewer workers, or more, while it trains."""
        return self.min_workers is not None

    @property
    def fewest(self) -> int:
        """Workers without which the run does not start."""
        return self.min_workers or self.num_workers

    @property
    def sizes(self) -> range:
        """All numbers of workers that the run may have."""
        return range(self.fewest, self.num_workers + 1, self.workers_per_node)


class Storage(Section):
    """Where the folders of runs lie."""

    path: str
    """A folder that all nodes share, or `s3://bucket/prefix`."""

    endpoint: str | None = None
    """Address of an S3 server that is not AWS, such as `http://minio.storage:9000`."""

    @property
    def uri(self) -> str:
        """As Ray and pyarrow take it: `s3://bucket/prefix?scheme=http&endpoint_override=host:9000`."""
        if self.endpoint is None:
            return self.path
        server = urlsplit(self.endpoint)
        return f"{self.path}?scheme={server.scheme}&endpoint_override={server.netloc}"

    def absolute(self) -> Storage:
        """The same from any working directory."""
        if "://" in self.path:
            return self
        return self.model_copy(update={"path": str(Path(self.path).resolve())})

    @classmethod
    def of_uri(cls, uri: str) -> Storage:
        """What `uri` gives, back again."""
        path, _, query = uri.partition("?")
        told = dict(parse_qsl(query))
        if "endpoint_override" not in told:
            return cls(path=path)
        return cls(path=path, endpoint=f"{told['scheme']}://{told['endpoint_override']}")


class AttemptConfig(Section):
    """What every attempt needs to know; travels as JSON in `TRAINYARD_CONFIG`."""

    name: RunName
    """The run: its identity, and its folder below the storage path."""

    faults: Faults = Faults()
    """How many failures it survives."""

    scaling: Scaling
    """The numbers of the plan."""

    storage: Storage
    """Where its folder lies."""


class TrainerConfig(AttemptConfig):
    """An attempt at a recipe that trains a network."""

    data: Data
    """What to train on."""

    train: AnyTrain
    """The recipe."""

    checkpoint: Checkpoint = Checkpoint()
    """When the run is saved."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> TrainerConfig:
        require_fit(self.data, self.train)
        require_one_size(self.train, "scaling.num_workers", is_elastic=self.scaling.is_elastic)
        return self


class BoostingConfig(AttemptConfig):
    """An attempt at `gradient_boosting`."""

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


class FunctionConfig(UserCodeConfig):
    """An attempt of a run whose training function is the user's."""

    function: Function
    """The function that each Ray Train worker calls, as `module:callable`."""

    train_loop_config: dict[str, Any] = Field(default_factory=dict)
    """The argument of that function."""

    datasets: dict[str, str] = Field(default_factory=dict)
    """The paths of the Parquet files that Ray Data gives to the workers, by name."""


RecipeConfig = TrainerConfig | BoostingConfig
"""An attempt at a built-in recipe."""

AnyConfig = TrainerConfig | BoostingConfig | CommandConfig | FunctionConfig

KINDS: Mapping[str, type[AnyConfig]] = {
    "train": TrainerConfig,
    BOOSTING: BoostingConfig,
    "command": CommandConfig,
    "function": FunctionConfig,
}
"""Of an attempt, by what `kinds_of` says."""


def kinds_of(document: Mapping[str, Any]) -> list[str]:
    """What a run file or a config says is run: the keys among `train`, `command` and `function`, of which
    there should be one; `train` of another shape by its recipe."""
    kinds = [key for key in ("train", "command", "function") if key in document]
    is_boosting = recipe_named(document.get("train")) == BOOSTING
    return [BOOSTING if kind == "train" and is_boosting else kind for kind in kinds]


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
