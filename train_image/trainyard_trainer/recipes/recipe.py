"""The base class of recipes: what the engine has to know of a kind of task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.metric import Metric
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import DataInfo, RunData
from trainyard_trainer.data.loading.user_dataset import Collate, UserSamples, stacked
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.units import units
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.example_inputs import ExampleInputs
from trainyard_trainer.recipes.loss import Evaluation, Loss, Sums, Top
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

Config = TypeVar("Config", bound=Section)

Forward = Callable[..., Any]
"""The model of a run: its forward pass in `train.precision`, whose floating-point outputs are float32."""

Networks = Mapping[str, Forward]
"""The model of a recipe with `networks`: the forward passes of the model's children, by name."""


class Recipe(Generic[Config]):
    """A kind of task: its model, loss, metrics and report.

    A subclass has to define `build_model` and `loss` (`network_loss` if it has `networks`); all else has a
    default. A run makes one instance in each of its processes.
    """

    settings: ClassVar[type[Section]] = Section
    """The pydantic model of the config's section `train.model`; by default it has no keys."""

    samples: ClassVar[str] = "samples"
    """What a sample is called in messages, in the plural."""

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The metrics beside the loss; `loss` and `evaluate` return the sums of each of them, and `measure` those
    of metrics that are for validations only."""

    networks: ClassVar[tuple[str, ...]] = ()
    """The children of the model that are trained in turn, in this order in each step, as those of a GAN.

    Each has an optimizer of its own, which `train.optimizers` can set, and a `network_loss`. Methods with the
    parameter `model` get `Networks` then. By default one optimizer trains the whole model.
    """

    saves_frozen_weights: bool = True
    """Whether checkpoints and model.pt hold the weights that are not trained (`requires_grad = False`).

    A recipe that reads them from a file of its own in `build_model` or `load_weights` needs no copies.
    """

    def __init__(self, config: Config, info: DataInfo | None = None) -> None:
        """`config` is the validated section `train.model`; `info` is None until the data are prepared."""
        self.config = config
        self._info = info

    @classmethod
    def of_run(cls, run: TrainerConfig, info: DataInfo | None) -> Self:
        """Create the recipe of a run. Override it to read more of the run's config than `train.model`."""
        model: Any = run.train.model
        return cls(model, info)

    @property
    def info(self) -> DataInfo:
        """Format and statistics of the prepared data set."""
        if self._info is None:
            raise LookupError("the data set is not prepared yet")
        return self._info

    @property
    def prepared_info(self) -> DatasetInfo:
        """Format and statistics of the prepared data set, for recipes that need one."""
        assert isinstance(self.info, DatasetInfo)
        return self.info

    # What a recipe has to define.

    def build_model(self) -> nn.Module:
        """Build the network with random weights. Raises ConfigError if there is no such network."""
        raise NotImplementedError

    def loss(self, model: Forward, batch: Batch) -> Loss:
        """Compute the loss of a training batch, which is on the device.

        `model` takes the arguments of the network's `forward`; call it once.
        """
        raise NotImplementedError

    def network_loss(self, network: str, models: Networks, batch: Batch) -> Loss:
        """Compute the loss that trains one of `networks`, in place of `loss`.

        The step of a network computes no gradients of the parameters of the others. The `metrics` of the
        networks are different ones, and together all of those that the recipe declares. The loss of the first
        network is recorded as `loss`.
        """
        raise NotImplementedError

    # Training and validation.

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """Make the columns of a batch from samples of a data set of your own; by default they are stacked.

        Override it for columns whose samples differ in shape, to pad or to pack them.
        """
        return stacked(samples)

    def augment(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        """Change a training batch on the device, at random: by `random_numbers` of seed, epoch and ids."""
        return batch

    def loss_weight(self, batch: Batch) -> Tensor | None:
        """Return the weight of a batch's loss before it is computed; None if it is not known until then.

        `strategy: deepspeed` needs it where a step has several passes and `loss` returns a tensor as weight.
        """
        return None

    def evaluate(self, model: Forward, batch: Batch) -> Evaluation:
        """Compute loss, metrics and details of a validation batch, without gradients."""
        if self.networks:
            parts = [self.network_loss(name, model, batch) for name in self.networks]  # type: ignore[arg-type]
        else:
            parts = [self.loss(model, batch)]
        metrics = {name: sums for part in parts for name, sums in part.metrics.items()}
        return Evaluation(sum=parts[0].sum, weight=parts[0].weight, metrics=metrics)

    def summarize(self, details: Mapping[str, Tensor | Top]) -> dict[str, Any]:
        """Turn the details of a whole validation, in host memory, into JSON for validation.json."""
        return {}

    def prepare(self, folder: RunFolder, say: Callable[[str], None]) -> None:
        """Prepare what the workers need beside the data, such as the files of a pretrained model.

        The driver calls it before workers start, with the run's folder; `say` prints a line. Raises
        ConfigError.
        """

    def pinned_model(self, folder: RunFolder) -> Config:
        """Return the settings of the model with a version that does not change while the run lasts.

        The driver calls it first; `folder` is the run's. Raises TrainerError.
        """
        return self.config

    @property
    def fetches_files(self) -> bool:
        """Whether workers read files that `fetch` has to bring to their machine."""
        return False

    def fetch(self) -> str:
        """Copy to this machine what workers read from elsewhere, and return its SHA-256.

        It is called once on each node, before workers start there. Raises TrainerError.
        """
        raise NotImplementedError

    def note_fetched(self, folder: RunFolder, sha256: Collection[str]) -> None:
        """Record what the nodes have fetched, in the run's folder. Raises TrainerError if it differs."""

    def first_weights(self) -> str:
        """Say in a few words with which weights `build_model` begins, for the log of a run."""
        return "from scratch"

    def load_weights(self, network: nn.Module) -> None:
        """Read the first weights of a network that `build_model` has built without storage.

        With FSDP2, `build_model` may return parameters on the meta device. This method is then called on
        each worker after the network is sharded, and fills the worker's shards.
        """
        raise NotImplementedError

    def measure(self, model: Forward, worker: Worker) -> Mapping[str, Sums]:
        """Return the sums of metrics that need other samples than the data set's, of this worker's share.

        All workers call it at a validation, without gradients. With a sharded model they have to call
        `model` equally often.
        """
        return {}

    def demonstrate(self, model: Forward, *, step: int) -> dict[str, Any]:
        """Show what the model produces at a validation, such as texts, as JSON for validation.json.

        Random numbers should follow from the seed and `step`, the number of optimizer steps that are done.
        Gradients are off. With a sharded model all workers call it, and have to use `model` alike.
        """
        return {}

    def parameter_groups(self, model: nn.Module) -> Iterable[Tensor | dict[str, Any]]:
        """Return the parameters, or parameter groups for the optimizer with options of their own.

        A group's `lr_scale` multiplies the learning rate of the schedule. Each parameter that is trained has
        to be in one of the groups. With `networks` it is called for each of them.
        """
        return model.parameters()

    def fsdp_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules whose weights FSDP2 gathers together; by default the large blocks.

        With `networks` it is called for each child of the model.
        """
        return list(units(model))

    # After training.

    def predict(self, model: Forward, batch: Batch) -> Mapping[str, Tensor]:
        """Compute what `trainyard predict` prints of each sample: tensors whose first axis has the samples.

        `model` is the network in evaluation mode, and gradients are off. By default there is no prediction.
        """
        raise ConfigError(
            f"{self.title()} has no predictions: define predict(self, model, batch) in the recipe"
        )

    def open_samples(self, path: str) -> UserSamples | None:
        """Open other files than those of the run for `trainyard predict --data`, as a data set of samples.

        It has `__len__` and `__getitem__`, as that of `data.dataset`. By default there is none, and the files
        are read as a table, as those of `data.source`. Raises ConfigError.
        """
        return None

    def example_inputs(self, count: int) -> ExampleInputs:
        """Return inputs of the network for so many samples, which all exports but a state_dict need."""
        raise ConfigError(
            f"{self.title()} can be exported as a state_dict only: for other formats define "
            "example_inputs(self, count) in the recipe"
        )

    # Checks before training.

    def prepare_options(self) -> dict[str, Any]:
        """Return the options of data preparation that follow from the config."""
        return {}

    def check(self) -> int:
        """Return the number of parameters. Raises ConfigError if there is no such network."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in self.build_model().parameters())

    def check_fit(self) -> None:
        """Raise ConfigError if the model does not fit the data set."""

    def takes_one_sample(self) -> bool:
        """Whether the model can be trained on a batch of one sample; batch norm cannot."""
        return True

    # Messages and results.

    def title(self) -> str:
        """Return a short name of the model for messages and the report."""
        return type(self).__name__

    def describe(self) -> str:
        """Describe the samples of the data set in a few words."""
        return self.samples

    def metadata(self) -> dict[str, Any]:
        """Return as JSON what a user of the trained model must know about its input."""
        return {"source": self.info.source}

    def speeds(self, samples_per_s: float) -> dict[str, float]:
        """Return the speed in further units, by the metrics' names in `run_folder.metrics`."""
        return {}

    def flops_per_sample(self) -> float | None:
        """Return the FLOPs of a forward and backward pass per sample; None if the MFU is not wanted."""
        return None

    def report(
        self,
        folder: RunFolder,
        run: TrainerConfig,
        data: RunData,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        """Make the recipe's part of the report; `validation` is what the delivered checkpoint's file has."""
        from trainyard_trainer.report.page import RecipeReport, Tile

        metric = self.metrics[0].name if self.metrics else "loss"
        return RecipeReport(
            title=self.title(),
            result=Tile(f"validation {metric}", f"{validation[metric]:.4g}"),
            speed=(
                Tile("samples per second", f"{summary['samples_per_s']:,.0f}"),
                Tile(f"{self.samples} seen", f"{summary['samples_seen']:,}"),
            ),
            sections=(),
            facts=(
                (f"training {self.samples}", f"{data.num_train:,}"),
                (f"validation {self.samples}", f"{data.num_valid:,}"),
                ("validation loss", f"{validation['loss']:.4g}"),
            ),
        )


def collate_of(recipe: Recipe[Any]) -> Collate:
    """Return the recipe's `collate`, or `stacked` itself: a table is then stacked column by column."""
    is_default = getattr(recipe.collate, "__func__", None) is Recipe.collate
    return stacked if is_default else recipe.collate
