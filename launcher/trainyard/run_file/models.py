"""The strict models of a run file: its own sections, and one model for each kind of run.

Sections that the training program reads too (`data`, `train`, `checkpoint`, `faults`, `command`, `function`)
come from `trainyard_trainer.config`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PositiveInt,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from trainyard.run_file.metadata import Annotations, Labels
from trainyard.run_file.network import Network
from trainyard.run_file.queue import Queue, TopologyMode
from trainyard_trainer.config.checkpoint import BoostingCheckpoint, CheckpointConfig
from trainyard_trainer.config.data.section import Data, Loading, Table
from trainyard_trainer.config.limits import Limits
from trainyard_trainer.config.notify import Notify
from trainyard_trainer.config.scaling import RECIPE_FAULTS, Faults
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import RunName
from trainyard_trainer.config.training.boosting import Boosting, require_boosting_fit
from trainyard_trainer.config.training.own_recipe import OWN_RECIPE, OwnData, OwnRecipe
from trainyard_trainer.config.training.recipes import BOOSTING, AnyTrain
from trainyard_trainer.config.training.train import Train, require_fit, require_one_size
from trainyard_trainer.config.user_code import Command, Reference, RunWith
from trainyard_trainer.config.variables import Secrets, Variables

_PATH_COMPONENT = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
IMAGE_REFERENCE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::\d+)?/)?{_PATH_COMPONENT}(?:/{_PATH_COMPONENT})*"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
"""A container image reference: [REGISTRY[:PORT]/]NAME[:TAG][@DIGEST]."""


def _require_tag(image: str) -> str:
    """Return the image reference if it has a digest, or a tag other than `latest`.

    Without one of them, two attempts of a run could start from different images.
    """
    found = IMAGE_REFERENCE.fullmatch(image)
    if found is None:
        raise PydanticCustomError(
            "image",
            "must be REGISTRY/NAME:TAG, with NAME in lower case, or NAME@sha256:<64 digits>",
        )
    if not found["digest"] and found["tag"] in (None, "latest"):
        raise PydanticCustomError(
            "image", "must have a tag other than latest, or a digest: NAME:TAG or NAME@sha256:..."
        )
    return image


Image = Annotated[str, AfterValidator(_require_tag)]
"""A container image reference with a fixed tag or a digest."""

WORKER_LIMIT = 8192
"""The largest number of workers that is planned and tested."""

Count = Annotated[int, Field(gt=0, le=WORKER_LIMIT)]
"""A number of GPUs or workers of a run."""


class ElasticRange(Section):
    """The smallest and the largest number of GPUs or workers of an elastic run."""

    min: Count
    """The run starts with this number, and continues as long as this number is available."""

    max: Count
    """The run grows up to this number when the cluster has room for it."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ElasticRange:
        if self.min >= self.max:
            raise PydanticCustomError(
                "one_of", "min must be below max; for a fixed size write one number instead"
            )
        return self


NUMBER, RANGE = "<number>", "<range>"
"""Tags by which pydantic tells `8` and `{min: 8, max: 16}` apart. No key of a run file looks like them."""

CountOrRange = Annotated[
    Annotated[Count, Tag(NUMBER)] | Annotated[ElasticRange, Tag(RANGE)],
    Discriminator(lambda value: RANGE if isinstance(value, dict | ElasticRange) else NUMBER),
]
"""A number, or `{min: 8, max: 16}` for an elastic run, whose size follows the cluster's capacity."""


POOL_LIMIT = 8
"""The largest number of pools in a list. The scheduler's weights from 1 to 100 order no more."""

NAME, LIST = "<name>", "<list>"
"""Tags by which pydantic tells `a100` and `[a100-spot, a100]` apart."""


def _distinct(pools: tuple[str, ...]) -> tuple[str, ...]:
    """Return the list of pools if no pool is in it twice."""
    for pool in pools:
        if pools.count(pool) > 1:
            raise PydanticCustomError(
                "distinct", "must name each pool once: {pool}", {"pool": pool}
            )
    return pools


def _one_pool(pools: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the only pool of a list of one, which means the same."""
    return pools[0] if isinstance(pools, tuple) and len(pools) == 1 else pools


PoolList = Annotated[
    tuple[str, ...],
    Field(
        strict=False, min_length=1, max_length=POOL_LIMIT, json_schema_extra={"uniqueItems": True}
    ),
    AfterValidator(_distinct),
]
"""Names of pools, the preferred one first."""

PoolOrList = Annotated[
    Annotated[str, Tag(NAME)] | Annotated[PoolList, Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list | tuple) else NAME),
    AfterValidator(_one_pool),
]
"""The name of a pool, or a list of names."""


class DataNodes(Section):
    """Nodes without GPUs on which only the Ray loader reads and decodes data."""

    pool: str | None = None
    """Pool of these nodes; it must have no GPUs. Default: the platform's default pool for workers."""

    nodes: PositiveInt
    """Number of nodes. Each is used as a whole."""


class Resources(Section):
    """Resources of the run in the cluster: exactly one of `gpus` and `workers`."""

    gpus: CountOrRange | None = None
    """Number of GPUs of the whole run, or `{min, max}` for an elastic run. One worker starts per GPU."""

    workers: CountOrRange | None = None
    """Number of CPU workers of the whole run, or `{min, max}` for an elastic run."""

    pool: PoolOrList | None = None
    """Pool of the platform to run on, or a list of pools, such as `[a100-spot, a100]`: the workers may run
    on the nodes of each of them, and the first is preferred. Default: the platform's default pool for GPUs
    or for workers."""

    topology_mode: TopologyMode | None = None
    """How strictly Kueue packs the workers by the pool's `topologyKey`, such as the label of a rack.
    `preferred`: into one rack if possible. `required`: into one rack, for which the run waits.
    `unconstrained`: anywhere. Default: the pool's `topologyMode`."""

    data: DataNodes | None = None
    """Separate nodes for the Ray loader. Default: it reads and decodes on the nodes of the workers."""

    cluster: str | None = None
    """The platform's standing RayCluster, whose pods exist already and which the run shares with other runs.
    Its name is `trainyard` (`--warm`). Default: each attempt gets a RayCluster of its own."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Resources:
        if (self.gpus is None) == (self.workers is None):
            raise PydanticCustomError(
                "one_of", "must have exactly one of gpus and workers (--gpus N or --workers N)"
            )
        return self

    @model_validator(mode="after")
    def _fits_a_standing_cluster(self) -> Resources:
        if self.cluster is not None and (
            self.is_elastic or self.data is not None or self.topology_mode is not None
        ):
            raise PydanticCustomError(
                "one_of",
                "with cluster (--warm), whose nodes are given, the number of workers is fixed, and there are "
                "no data nodes and no topology_mode",
            )
        return self

    @property
    def pools(self) -> tuple[str, ...]:
        """The named pools, the preferred one first. Empty if the run file names none."""
        if self.pool is None:
            return ()
        return (self.pool,) if isinstance(self.pool, str) else self.pool

    @property
    def unit(self) -> Literal["gpus", "workers"]:
        """The key that is set: `gpus` or `workers`."""
        return "workers" if self.gpus is None else "gpus"

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of GPUs or workers. Equal unless the run is elastic."""
        amount = self.workers if self.gpus is None else self.gpus
        assert amount is not None
        return (amount.min, amount.max) if isinstance(amount, ElasticRange) else (amount, amount)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of GPUs or workers may change while the run trains."""
        return self.bounds[0] != self.bounds[1]


def _require_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names if none occurs twice."""
    if twice := {name for name in names if names.count(name) > 1}:
        raise PydanticCustomError("one_of", f"contains {min(twice)} twice: remove one of them")
    return names


VolumeNames = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")], ...],
    Field(strict=False),
    AfterValidator(_require_unique),
]
"""Names of data volumes."""


Code = Annotated[
    str | None,
    Field(
        description="Folder with your code, relative to the run file. It is packed and sent with the run, "
        "and the code runs in it. Files that .gitignore names are left out."
    ),
]
"""The folder of the user's code."""


class RunConfig(Section):
    """The keys that every run file has, whatever it runs."""

    name: RunName
    """The run's identity. Its folder is `<storage>/<name>/`, and the run resumes from there."""

    image: Image | None = None
    """Container image of all pods. Default: the platform's image."""

    resources: Resources
    """Resources of the run in the cluster."""

    faults: Faults = Faults()
    """Retries and timeouts after failures."""

    limits: Limits = Limits()
    """Deadlines of the run and of its start."""

    queue: Queue | None = None
    """Queue in which the run waits for its resources. Default: the platform's queue, if it has one."""

    network: Network | None = None
    """Network between the workers. Default: the pool's network settings."""

    volumes: VolumeNames = ()
    """Data volumes of the platform that the head and all workers mount, by name, such as `[imagenet]`. On a
    laptop nothing is mounted, and paths are used as they are. They do not belong to the run's identity."""

    env: Variables = Field(default_factory=dict)
    """Environment variables of the driver and of all workers, such as `{HF_HUB_OFFLINE: "0"}`. They override
    the variables that trainyard sets for training libraries. Do not put credentials here."""

    secrets: Secrets = Field(default_factory=dict)
    """Environment variables whose values come from Secrets, such as `{HF_TOKEN: {name: hub, key: token}}`. On
    this machine a value is taken from the environment variable of the same name."""

    notify: Notify | None = None
    """Who gets a message when the run has ended. Default: the platform's receiver, if it has one."""

    labels: Labels = Field(default_factory=dict)
    """Labels of the RayJob and of the run's pods, such as `{example.com/team: vision}`. No effect on this
    machine."""

    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the RayJob and of the run's pods. No effect on this machine."""

    @model_validator(mode="after")
    def _variables_are_set_once(self) -> Self:
        for name in self.env.keys() & self.secrets.keys():
            raise PydanticCustomError(
                "one_of", f"env.{name} and secrets.{name} set the same variable: remove one of them"
            )
        return self


class NetworkRun(RunConfig):
    """A run file with a recipe that trains a neural network."""

    data: Loading
    """Data to train on."""

    train: Train
    """The recipe and its settings."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, and which are kept."""

    @model_validator(mode="after")
    def _has_a_possible_size(self) -> Self:
        unit = f"resources.{self.resources.unit}"
        require_one_size(self.train, unit, is_elastic=self.resources.is_elastic)
        return self

    @model_validator(mode="after")
    def _data_nodes_are_used(self) -> Self:
        if self.resources.data is None:
            return self
        if self.data.loader != "ray":
            raise PydanticCustomError(
                "one_of",
                "resources.data is only for the Ray loader: set data.loader to ray, or remove resources.data",
            )
        if self.data.ray_nodes is not None:
            raise PydanticCustomError(
                "one_of",
                "resources.data and data.ray_nodes both select the nodes of the Ray loader: "
                "remove data.ray_nodes",
            )
        return self


class OwnRecipeRun(NetworkRun):
    """A run file with a recipe of the user."""

    code: Code = None

    data: OwnData
    """Data set to train on."""

    train: OwnRecipe
    """The recipe and its settings."""


class RecipeRun(NetworkRun):
    """A run file with a built-in recipe that trains a neural network."""

    data: Data
    """Data to train on."""

    train: AnyTrain
    """The recipe and its settings."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> RecipeRun:
        require_fit(self.data, self.train, self.checkpoint)
        return self


class BoostingRun(RunConfig):
    """A run file with the recipe `gradient_boosting`."""

    data: Table
    """Table to train on."""

    train: Boosting
    """Settings of the gradient-boosted trees."""

    checkpoint: BoostingCheckpoint = BoostingCheckpoint()
    """When checkpoints are saved, and which are kept."""

    @model_validator(mode="after")
    def _sections_fit(self) -> BoostingRun:
        require_boosting_fit(self.data, self.train, self.checkpoint)
        resources = self.resources
        if resources.unit == "gpus":
            raise PydanticCustomError(
                "one_of",
                f"resources.gpus is not for train.recipe = {BOOSTING}, which trains on CPUs only: "
                "use resources.workers (--workers N)",
            )
        if resources.is_elastic:
            raise PydanticCustomError(
                "one_of",
                f"resources.workers must be a number for train.recipe = {BOOSTING}: the rows are divided "
                "among the workers once, when they start",
            )
        if resources.data is not None:
            raise PydanticCustomError(
                "one_of",
                f"resources.data is for the Ray loader, which train.recipe = {BOOSTING} does not "
                "use: remove it",
            )
        return self


class UserCodeRun(RunConfig):
    """A run file with the user's own code instead of a built-in recipe."""

    code: Code = None

    @model_validator(mode="after")
    def _has_one_number_of_workers(self) -> UserCodeRun:
        if self.resources.is_elastic:
            raise PydanticCustomError(
                "one_of",
                f"resources.{self.resources.unit} must be a number: {{min, max}} is for built-in recipes",
            )
        if self.resources.data is not None:
            raise PydanticCustomError(
                "one_of", "resources.data is for the Ray loader of a recipe: remove it"
            )
        if unfit := [key for key in RECIPE_FAULTS if key in self.faults.model_fields_set]:
            raise PydanticCustomError(
                "one_of",
                f"faults.{unfit[0]} is for recipes: remove it; your code sets the timeouts of its process "
                "group, and keeps its own state",
            )
        return self


class CommandRun(UserCodeRun):
    """A run file with a program of the user."""

    command: Command
    """The program and its arguments. It starts when the run's Ray cluster is up. `{workers}`, `{gpus}`,
    `{storage}`, `{run}` and `{attempt}` are replaced by their values. Write `{{run}}` for the text
    `{run}`."""

    run_with: RunWith | None = None
    """`torchrun`: the command is a script and its arguments, and torchrun starts it once for each worker on
    all nodes. Use it for distributed code that does not use Ray. Without this key the command is started
    once, on the head node."""

    library_hook: bool = True
    """Whether Transformers' Trainer, TRL and Lightning go on from their newest complete checkpoint when
    the run is started again, and write relative output folders into the run's folder. `false` leaves the
    libraries unchanged."""


class FunctionRun(UserCodeRun):
    """A run file with a training function of the user, which Ray Train calls on each worker."""

    function: Reference
    """The training function as `module:callable`: the `train_loop_per_worker` of a Ray TorchTrainer."""

    train_loop_config: dict[str, Any] = Field(default_factory=dict)
    """The argument with which the function is called: Ray Train's `train_loop_config`."""

    datasets: dict[str, str] = Field(default_factory=dict)
    """Parquet files by name, such as `{train: s3://bucket/train}`. In the function,
    `ray.train.get_dataset_shard(name)` returns the worker's shard."""


RunWithCode = UserCodeRun | OwnRecipeRun
"""A run that may have a folder with the user's code."""

RUN_MODELS: dict[str, type[RunConfig]] = {
    "train": RecipeRun,
    OWN_RECIPE: OwnRecipeRun,
    BOOSTING: BoostingRun,
    "command": CommandRun,
    "function": FunctionRun,
}
"""The model of a run file for each kind of run that `kinds_of` can return."""
