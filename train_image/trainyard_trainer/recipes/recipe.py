"""The interface between the engine and a recipe: what differs between images and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import DatasetInfo, Prepared
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.validation import BatchLoss, Validation
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport


class ValidationMetrics(Protocol):
    """Accumulates validation metrics over one worker's share of the validation samples."""

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Add the outputs, in float32, for a batch."""

    def compute(self) -> Validation:
        """Return the metrics over all workers. All workers must call it."""


class WorkerTask(Protocol):
    """A recipe on one worker, for the data set of a run."""

    def build(self) -> nn.Module:
        """Build the network with random weights, in the memory format of the worker."""

    def inputs(self, batch: Batch, *, epoch: int | None = None) -> torch.Tensor:
        """Make the network's inputs from a batch on the device; with an epoch, augment them for training."""

    def empty_inputs(self) -> torch.Tensor:
        """Make the smallest inputs that the network accepts, for a worker whose part of a batch is empty."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> BatchLoss:
        """Compute the loss of outputs, in float32. Each sample of the batch has the same weight."""

    def metrics(self, worker: Worker) -> ValidationMetrics:
        """Create an empty accumulator for a validation."""


class Recipe(Protocol):
    """A recipe: model, loss, metrics and report of one kind of task.

    In all methods `model` is the config's section `train.model`.
    """

    samples: str
    """What a sample is called in messages, in the plural, such as `images`."""

    @property
    def settings(self) -> type[Section]:
        """The pydantic model of the config's section `train.model`."""

    def prepare_options(self, model: Any) -> dict[str, Any]:
        """Return the options of data preparation that follow from the model."""

    def build(self, model: Any) -> nn.Module:
        """Build the network with random weights. Raises ConfigError if there is no such network."""

    def check(self, model: Any) -> int:
        """Return the number of parameters. Raises ConfigError if there is no such network."""

    def check_fit(self, model: Any, images: DatasetInfo) -> None:
        """Raise ConfigError if the model does not fit the data set."""

    def takes_one_sample(self, model: Any) -> bool:
        """Whether the model can be trained on a batch of one sample."""

    def title(self, model: Any) -> str:
        """Return a short name of the model for messages and the report."""

    def describe(self, images: DatasetInfo) -> str:
        """Describe the samples of the data set in a few words."""

    def metadata(self, model: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
        """Return what a user of the model must know about its input; arguments and result are plain JSON."""

    def worker_task(
        self, config: TrainerConfig, images: DatasetInfo, device: torch.device
    ) -> WorkerTask:
        """Create the recipe's part of one worker."""

    def speeds(self, model: Any, samples_per_s: float, worker: Worker | None) -> dict[str, float]:
        """Return the speed in further units, by the metrics' names in `run_folder.metrics`.

        `worker` is one of the training workers, or None where no worker runs.
        """

    def report(
        self,
        folder: RunFolder,
        config: TrainerConfig,
        data: Prepared,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        """Make the recipe's part of the report."""
