"""The interface between the engine and a kind of task: what differs between an image and a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import DatasetInfo, Prepared
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.validation import Judged, Validation
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import Own


class Gathered(Protocol):
    """What one worker's share of the validation samples comes out as."""

    def add(self, outputs: torch.Tensor, batch: Batch) -> None: ...

    def over_all(self) -> Validation:
        """Of all workers together; all of them must ask."""


class Lesson(Protocol):
    """A recipe on one worker, with the data of a run."""

    def build(self) -> nn.Module:
        """The network with random weights, as the worker wants it in memory."""

    def inputs(self, batch: Batch, *, epoch: int | None = None) -> torch.Tensor:
        """What the network takes, of a batch on the device; with an epoch, changed at random as it trains."""

    def no_inputs(self) -> torch.Tensor:
        """The least that the network takes, where a worker has no samples."""

    def judged(self, outputs: torch.Tensor, batch: Batch) -> Judged:
        """Outputs, in float32, against what was right. Each sample of a batch weighs the same."""

    def answers(self, worker: Worker) -> Gathered: ...


class Recipe(Protocol):
    """A recipe by itself; `model` is a config's `train.model`."""

    samples: str
    """What is learnt from, in one word."""

    @property
    def settings(self) -> type[Section]:
        """Of `train.model`."""

    def form(self, model: Any) -> dict[str, Any]:
        """Options of a preparation that follow from the model."""

    def build(self, model: Any) -> nn.Module:
        """The network with random weights. Raises ConfigError."""

    def check(self, model: Any) -> int:
        """Number of parameters. Raises ConfigError for a network that cannot be."""

    def check_fit(self, model: Any, images: DatasetInfo) -> None:
        """Raises ConfigError if the model is for other data."""

    def takes_one_sample(self, model: Any) -> bool:
        """Whether the model can learn from a batch of one."""

    def title(self, model: Any) -> str:
        """The model in a few words."""

    def describe(self, images: DatasetInfo) -> str:
        """What the data's samples are."""

    def facts(self, model: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
        """What whoever uses the model must know of its input, given plain JSON."""

    def lesson(self, config: TrainerConfig, images: DatasetInfo, device: torch.device) -> Lesson:
        """The same on one worker."""

    def speeds(self, model: Any, samples_per_s: float, worker: Worker | None) -> dict[str, float]:
        """The same speed in the recipe's own units; `worker` is one of those that train."""

    def findings(
        self,
        folder: RunFolder,
        config: TrainerConfig,
        data: Prepared,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> Own:
        """The recipe's own part of the report."""
