"""The recipe `image_classification`: which class an image is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from trainyard_trainer.config.data.section import Augment, Data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.config.training.train import ImageClassification
from trainyard_trainer.data.image_stream import ImageStream
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import DataInfo, RunData
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.recipes.example_inputs import ExampleInputs
from trainyard_trainer.recipes.image_classification import model as models
from trainyard_trainer.recipes.image_classification.on_device import ToInput, augmented
from trainyard_trainer.recipes.loss import Evaluation, Loss, Top
from trainyard_trainer.recipes.recipe import Forward, Recipe
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

NUM_WORST = 18
"""The number of worst mistakes that a validation keeps."""


class Classification(Recipe[Model]):
    """A torchvision model on images with labels."""

    settings = Model
    samples = "images"
    metrics = ImageClassification.metrics

    def __init__(
        self,
        config: Model,
        info: DataInfo | None = None,
        *,
        augment: Augment | None = None,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
    ) -> None:
        super().__init__(config, info)
        self._augment = augment or Augment()
        self._label_smoothing = label_smoothing
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._to_input = cache(
            lambda device: ToInput(self.prepared_info, config.image_size, device)
        )

    @classmethod
    def of_run(cls, run: TrainerConfig, info: DataInfo | None) -> Self:
        train = run.train
        assert isinstance(train, ImageClassification)
        assert isinstance(run.data, Data)
        return cls(
            train.model,
            info,
            augment=run.data.augment,
            label_smoothing=train.label_smoothing,
            channels_last=train.channels_last,
        )

    def build_model(self) -> nn.Module:
        return models.build_model(self.config).to(memory_format=self._layout)  # type: ignore[call-overload]

    def inputs(self, batch: Batch) -> Tensor:
        """Normalise and resize the images: (N, C, image_size, image_size) float32."""
        images = batch["image"]
        return self._to_input(images.device)(images).to(memory_format=self._layout)

    def augment(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        return batch.replace(image=augmented(batch, self._augment, seed=seed, epoch=epoch))

    def loss(self, model: Forward, batch: Batch) -> Loss:
        labels, scores = batch["label"], model(self.inputs(batch))  # (N,), (N, classes)
        return Loss(
            sum=functional.cross_entropy(
                scores, labels, reduction="sum", label_smoothing=self._label_smoothing
            ),
            weight=len(batch),
            metrics={"accuracy": ((scores.argmax(dim=1) == labels).sum(), len(batch))},
        )

    def evaluate(self, model: Forward, batch: Batch) -> Evaluation:
        labels, scores = batch["label"], model(self.inputs(batch))
        num_classes = len(self.prepared_info.classes)
        confidence, predicted = scores.softmax(dim=1).max(dim=1)
        is_right = predicted == labels
        pairs = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
        # Correct predictions get a negative confidence, which sorts them behind all mistakes.
        rows = [confidence.double() - 2 * is_right, batch.ids, labels, predicted]
        return Evaluation(
            sum=functional.cross_entropy(scores, labels, reduction="sum"),
            weight=len(batch),
            metrics={"accuracy": (is_right.sum(), len(batch))},
            details={
                "confusion": pairs.view(num_classes, num_classes),
                "worst": Top(torch.stack([row.double() for row in rows], dim=1), NUM_WORST),
            },
        )

    def summarize(self, details: Mapping[str, Tensor | Top]) -> dict[str, Any]:
        """Return the confusion matrix, and the mistakes with the highest confidence.

        `confusion` has (label, predicted class, count) of each non-zero entry; `worst` has the most confident
        mistake first, and its confidence is the probability of the predicted class.
        """
        confusion, worst = details["confusion"], details["worst"]
        assert isinstance(confusion, Tensor)
        assert isinstance(worst, Top)
        label, predicted = places = confusion.nonzero(as_tuple=True)
        counts = confusion[places]
        return {
            "confusion": torch.stack([label, predicted, counts], dim=1).tolist(),
            "worst": [
                {"id": int(number), "label": int(truth), "predicted": int(said), "confidence": sure}
                for sure, number, truth, said in worst.rows.tolist()
                if sure > 0
            ],
        }

    def example_inputs(self, count: int) -> ExampleInputs:
        side = self.config.image_size
        shape = (count, self.config.in_channels, side, side)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return ExampleInputs(tensors={"images": images})

    def prepare_options(self) -> dict[str, Any]:
        return {
            "fallback_size": self.config.image_size,
            "channels": self.config.in_channels,
            "num_classes": self.config.num_classes,
        }

    def check(self) -> int:
        return models.check_model(self.config)

    def check_fit(self) -> None:
        models.check_fit(self.config, self.prepared_info)

    def takes_one_sample(self) -> bool:
        return models.takes_one_image(self.config)

    def title(self) -> str:
        return self.config.name

    def describe(self) -> str:
        info = self.prepared_info
        return f"images of {'x'.join(map(str, info.shape))}, {len(info.classes)} classes"

    def metadata(self) -> dict[str, Any]:
        channels, rows, columns = self.prepared_info.shape
        side = self.config.image_size
        return {
            "images": asdict(self.prepared_info),
            "input": {"shape": [None, channels, side, side], "dtype": "float32"},
            "preprocessing": [
                f"decode to 8 bits and {channels} channel{'s' if channels > 1 else ''}",
                f"resize to cover {rows} x {columns} and crop the centre to it",
                "divide by 255, subtract images.mean and divide by images.std, per channel",
                f"resize to {side} x {side}: bilinear, with antialiasing",
            ],
        }

    def report(
        self,
        folder: RunFolder,
        run: TrainerConfig,
        data: RunData,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        assert isinstance(data, Prepared | ImageStream)
        from trainyard_trainer.recipes.image_classification.report import (
            find,  # matplotlib comes with it
        )

        return find(folder, run, data, summary, validation)
