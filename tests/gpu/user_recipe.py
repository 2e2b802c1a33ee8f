"""A recipe and a data set as a user writes them, to train and measure on a GPU: which letter comes next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard_trainer import Batch, Evaluation, Loss, Recipe
from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.recipes.language_model.model import Transformer

RECIPE = "tests.gpu.user_recipe:NextLetter"
DATASET = "tests.gpu.user_recipe:Letters"


class Letters:
    """Rows of letters, each drawn anew in each epoch."""

    def __init__(self, split: str, count: int = 320, length: int = 65) -> None:
        self.count = count if split == "train" else count // 4
        self.length = length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = torch.randint(26, (1,))
        return {"text": (97 + (first + torch.arange(self.length)) % 26).to(torch.uint8)}


class NextLetter(Recipe[Gpt]):
    """Predicts each letter of a row but the first, with the built-in transformer."""

    settings = Gpt

    def build_model(self) -> nn.Module:
        return Transformer(self.config)

    def loss(self, model: Callable[..., Tensor], batch: Batch) -> Loss:
        rows = batch["text"].long()
        scores, targets = model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
        total = functional.cross_entropy(scores, targets, reduction="sum")
        return Loss(sum=total, weight=targets.numel())

    def evaluate(self, model: Callable[..., Tensor], batch: Batch) -> Evaluation:
        found = self.loss(model, batch)
        return Evaluation(sum=found.sum, weight=found.weight)

    def predict(self, model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
        return {"next": model(batch["text"][:, :-1].long())[:, -1].argmax(dim=1)}
