"""The recipe `image_classification`: which class an image is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from trainyard_trainer.config.data import Augment
from trainyard_trainer.config.models import Model
from trainyard_trainer.config.train import ImageClassification
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.on_device import ToInput, augmented
from trainyard_trainer.data.prepared import DatasetInfo, Prepared
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.image_classification import model as models
from trainyard_trainer.recipes.validation import BatchLoss, ClassificationMetrics
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

EMPTY_SHARE = 2
"""Images that stand in for none: batch norm wants more than one."""


class Classification:
    """A torchvision model on images with labels."""

    samples = "images"
    settings = Model

    def prepare_options(self, model: Model) -> dict[str, Any]:
        return {
            "fallback_size": model.image_size,
            "channels": model.in_channels,
            "num_classes": model.num_classes,
        }

    def build(self, model: Model) -> nn.Module:
        return models.build_model(model)

    def check(self, model: Model) -> int:
        return models.check_model(model)

    def check_fit(self, model: Model, images: DatasetInfo) -> None:
        models.check_fit(model, images)

    def takes_one_sample(self, model: Model) -> bool:
        return models.takes_one_image(model)

    def title(self, model: Model) -> str:
        return model.name

    def describe(self, images: DatasetInfo) -> str:
        return f"images of {'x'.join(map(str, images.shape))}, {len(images.classes)} classes"

    def metadata(self, model: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
        channels, rows, columns = images["shape"]
        side = model["image_size"]
        return {
            "images": images,
            "input": {"shape": [None, channels, side, side], "dtype": "float32"},
            "preprocessing": [
                f"decode to 8 bits and {channels} channel{'s' if channels > 1 else ''}",
                f"resize to cover {rows} x {columns} and crop the centre to it",
                "divide by 255, subtract images.mean and divide by images.std, per channel",
                f"resize to {side} x {side}: bilinear, with antialiasing",
            ],
        }

    def worker_task(
        self, config: TrainerConfig, images: DatasetInfo, device: torch.device
    ) -> ImageClassificationTask:
        assert isinstance(config.train, ImageClassification)
        return ImageClassificationTask(config.train, config.data.augment, images, device)

    def speeds(self, model: Model, samples_per_s: float, worker: Worker | None) -> dict[str, float]:
        """None beside samples per second, which every recipe has."""
        return {}

    def report(
        self,
        folder: RunFolder,
        config: TrainerConfig,
        data: Prepared,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        from trainyard_trainer.recipes.image_classification.report import (
            find,  # matplotlib comes with it
        )

        return find(folder, config, data, summary, validation)


class ImageClassificationTask:
    """Image classification on one worker: images become the network's inputs on the device."""

    def __init__(
        self,
        train: ImageClassification,
        augment: Augment,
        images: DatasetInfo,
        device: torch.device,
    ) -> None:
        self.train = train
        self.augment = augment
        self.images = images
        self.device = device
        self.to_input = ToInput(images, train.model.image_size, device)
        self.layout = torch.channels_last if train.channels_last else torch.contiguous_format

    def build(self) -> nn.Module:
        return models.build_model(self.train.model).to(memory_format=self.layout)  # type: ignore[call-overload]

    def inputs(self, batch: Batch, *, epoch: int | None = None) -> torch.Tensor:
        pixels = batch.pixels
        if epoch is not None:
            pixels = augmented(batch, self.augment, seed=self.train.seed, epoch=epoch)
        return self._to_input(pixels)

    def empty_inputs(self) -> torch.Tensor:
        shape = (EMPTY_SHARE, *self.images.shape)
        return self._to_input(torch.zeros(shape, dtype=torch.uint8, device=self.device))

    def loss(self, outputs: torch.Tensor, batch: Batch) -> BatchLoss:
        labels, smoothing = batch.labels, self.train.label_smoothing
        return BatchLoss(
            loss=functional.cross_entropy(outputs, labels, label_smoothing=smoothing),
            num_correct=(outputs.argmax(dim=1) == labels).sum(),
            num_targets=len(labels),
        )

    def metrics(self, worker: Worker) -> ClassificationMetrics:
        return ClassificationMetrics(len(self.images.classes), worker)

    def _to_input(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.to_input(pixels).to(memory_format=self.layout)
