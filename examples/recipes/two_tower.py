"""A two-tower model: queries and documents get vectors, and a query's own document has the nearest one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from trainyard_trainer import Batch, Loss, Metric, Recipe, Settings

TERMS = 50  # words of the language


class Pairs:
    """Made-up pairs: a document has 12 words, its query 4 of them. Columns count each word (TERMS,)."""

    def __init__(self, split: str, num_train: int = 2048, num_valid: int = 256) -> None:
        self.first, self.count = (0, num_train) if split == "train" else (num_train, num_valid)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        words = torch.randperm(TERMS, generator=draw)[:12]
        query, document = torch.zeros(2, TERMS)
        query[words[:4]] = 1
        document[words] = 1
        return {"query": query, "document": document}


class TwoTowers(nn.Module):
    """Two networks from counts of words to vectors of length 1, without common weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(TERMS, 128), nn.ReLU(), nn.Linear(128, size)) for _ in range(2)
        )

    def forward(self, *counts: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.towers, counts, strict=True)
        return [functional.normalize(tower(each), dim=1) for tower, each in pairs]


class TwoTowerSettings(Settings):
    """The keys of `train.model` in the run file."""

    size: int = 32
    """Length of the vectors."""
    temperature: float = 0.1
    """Cosine similarities are divided by it."""


class TwoTower(Recipe[TwoTowerSettings]):
    """Tells a query's document from the others of the same pass, so micro-batches change the task."""

    settings = TwoTowerSettings
    samples = "pairs"
    metrics = (
        Metric(
            name="recall_at_5",
            direction="higher",
            description="queries whose document is in the first 5",
        ),
    )

    def build_model(self) -> nn.Module:
        return TwoTowers(self.config.size)

    def loss(self, model: Callable[..., list[torch.Tensor]], batch: Batch) -> Loss:
        query, document = model(batch["query"], batch["document"])
        scores = query @ document.T / self.config.temperature
        own = torch.arange(len(batch), device=scores.device)
        first = scores.topk(min(5, len(batch)), dim=1).indices
        found = (first == own[:, None]).sum()
        total = functional.cross_entropy(scores, own, reduction="sum")
        return Loss(sum=total, weight=len(batch), metrics={"recall_at_5": (found, len(batch))})
