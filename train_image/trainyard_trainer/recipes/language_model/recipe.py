"""The recipe `language_model`: which byte of a text comes next."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from trainyard_trainer.config.models import Gpt
from trainyard_trainer.config.train import LanguageModel
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import RunData
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.example_inputs import ExampleInputs
from trainyard_trainer.recipes.language_model.model import Transformer, title_of
from trainyard_trainer.recipes.loss import Loss
from trainyard_trainer.recipes.recipe import Forward, Recipe
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

EXAMPLE_LENGTH = 32
"""The length of example inputs in bytes, if the context length is not shorter."""


class Language(Recipe[Gpt]):
    """A transformer on bytes of text: it predicts each byte of a row but the first."""

    settings = Gpt
    samples = "rows"
    metrics = LanguageModel.metrics

    def build_model(self) -> nn.Module:
        return Transformer(self.config)

    def loss(self, model: Forward, batch: Batch) -> Loss:
        rows = batch["text"].long()  # (N, context_length + 1)
        targets = rows[:, 1:]
        scores = model(rows[:, :-1])  # (N, context_length, 256)
        num_correct = (scores.argmax(dim=2) == targets).sum()
        return Loss(
            sum=functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"),
            weight=targets.numel(),
            metrics={"accuracy": (num_correct, targets.numel())},
        )

    def example_inputs(self, count: int) -> ExampleInputs:
        """Return rows of many short documents: bytes of 0 separate them."""
        length = min(self.config.context_length, EXAMPLE_LENGTH)
        generator = torch.Generator().manual_seed(0)
        return ExampleInputs(
            tensors={"text": torch.randint(8, (count, length), generator=generator)},
            free_axes={1: self.config.context_length},
        )

    def prepare_options(self) -> dict[str, Any]:
        return {"row_bytes": self.config.context_length + 1}

    def check(self) -> int:
        return parameters_of(self.config)

    def check_fit(self) -> None:
        info, wanted = self.prepared_info, self.config.context_length
        if info.kind != "text":
            raise ConfigError(
                f"{info.source} has images, and train.recipe = language_model learns from text. "
                "Use text, or train.recipe: image_classification."
            )
        found = info.bytes_per_sample - 1
        if found != wanted:
            raise ConfigError(
                f"train.model.context_length = {wanted}, but {info.source} is prepared for "
                f"{found}: use {found}, or prepare it again."
            )

    def title(self) -> str:
        return title_of(self.config)

    def describe(self) -> str:
        return f"rows of {self.prepared_info.bytes_per_sample - 1} bytes of text"

    def metadata(self) -> dict[str, Any]:
        return {
            "source": self.prepared_info.source,
            "input": {"shape": [None, None], "dtype": "int64"},
            "preprocessing": [
                "encode text as UTF-8; each byte is a number from 0 to 255, and 0 begins a document",
                f"give up to {self.config.context_length} of them: scores at a place are of the next byte",
            ],
        }

    def speeds(self, samples_per_s: float) -> dict[str, float]:
        """Return `tokens_per_s`; each byte is a token."""
        return {"tokens_per_s": samples_per_s * self.config.context_length}

    def flops_per_sample(self) -> float:
        return float(flops_per_token(self.config) * self.config.context_length)

    def report(
        self,
        folder: RunFolder,
        run: TrainerConfig,
        data: RunData,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        assert isinstance(data, Prepared)
        from trainyard_trainer.recipes.language_model.report import find

        return find(folder, run, data, summary, validation)


@cache
def parameters_of(model: Gpt) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(model).parameters())


def flops_per_token(model: Gpt) -> int:
    """Return the FLOPs of a forward and backward pass: 6 per parameter, and 12 per layer, width and byte."""
    return 6 * parameters_of(model) + 12 * model.layers * model.width * model.context_length
