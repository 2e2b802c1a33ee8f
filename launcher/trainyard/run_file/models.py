"""The strict models of a run file: its own sections, and one model for each kind of run.

Sections that the training program reads too (`data`, `train`, `checkpoint`, `faults`, `command`, `function`)
come from `trainyard_trainer.config`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PositiveInt, Tag, model_validator
from pydantic_core import PydanticCustomError

from trainyard.run_file.network import Network
from trainyard.run_file.queue import Queue
from trainyard_trainer.config.boosting import Boosting, require_boosting_fit
from trainyard_trainer.config.checkpoint import BoostingCheckpoint, CheckpointConfig
from trainyard_trainer.config.data import Data, Table
from trainyard_trainer.config.recipes import BOOSTING, AnyTrain
from trainyard_trainer.config.scaling import Faults
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.train import require_fit, require_one_size
from trainyard_trainer.config.trainer_config import RunName
from trainyard_trainer.config.user_code import Command, Function, RunWith

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

    pool: str | None = None
    """Pool of the platform to run on. Default: the platform's default pool for GPUs or for workers."""

    data: DataNodes | None = None
    """Separate nodes for the Ray loader. Default: it reads and decodes on the nodes of the workers."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Resources:
        if (self.gpus is None) == (self.workers is None):
            raise PydanticCustomError(
                "one_of", "must have exactly one of gpus and workers (--gpus N or --workers N)"
            )
        return self

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

    queue: Queue | None = None
    """Queue in which the run waits for its resources. Default: the platform's queue, if it has one."""

    network: Network | None = None
    """Network between the workers. Default: the pool's network settings."""


class RecipeRun(RunConfig):
    """A run file with a built-in recipe that trains a neural network."""

    data: Data
    """Data to train on."""

    train: AnyTrain
    """The recipe and its settings."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, and which are kept."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> RecipeRun:
        require_fit(self.data, self.train)
        unit = f"resources.{self.resources.unit}"
        require_one_size(self.train, unit, is_elastic=self.resources.is_elastic)
        return self

    @model_validator(mode="after")
    def _data_nodes_are_used(self) -> RecipeRun:
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

    code: str | None = None
    """Folder with your code, relative to the run file. It is packed and sent with the run, and the code
    runs in it. Files that .gitignore names are left out."""

    @model_validator(mode="after")
    def _has_one_number_of_workers(self) -> UserCodeRun:
        if self.resources.is_elastic:
            raise PydanticCustomError(
                "one_of",
                f"resources.{self.resources.unit} must be a number: {{min, max}} is for built-in recipes",
            )
        if self.resources.data is not None:
            raise PydanticCustomError(
                "one_of", "resources.data is for the Ray loader of a built-in recipe: remove it"
            )
        if "collective_timeout_s" in self.faults.model_fields_set:
            raise PydanticCustomError(
                "one_of",
                "faults.collective_timeout_s is for built-in recipes: pass the timeout to "
                "torch.distributed in your code",
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


class FunctionRun(UserCodeRun):
    """A run file with a training function of the user, which Ray Train calls on each worker."""

    function: Function
    """The training function as `module:callable`: the `train_loop_per_worker` of a Ray TorchTrainer."""

    train_loop_config: dict[str, Any] = Field(default_factory=dict)
    """The argument with which the function is called: Ray Train's `train_loop_config`."""

    datasets: dict[str, str] = Field(default_factory=dict)
    """Parquet files by name, such as `{train: s3://bucket/train}`. In the function,
    `ray.train.get_dataset_shard(name)` returns the worker's shard."""


RUN_MODELS: dict[str, type[RunConfig]] = {
    "train": RecipeRun,
    BOOSTING: BoostingRun,
    "command": CommandRun,
    "function": FunctionRun,
}
"""The model of a run file for each kind of run that `kinds_of` can return."""
