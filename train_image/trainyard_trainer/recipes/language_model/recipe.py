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
from trainyard_trainer.data.prepared import DatasetInfo, Prepared
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.language_model.model import Transformer, title_of
from trainyard_trainer.recipes.validation import BatchLoss, Validation
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

PEAK_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
"""FLOPs per second in bf16 without sparsity, as NVIDIA's data sheets have them, by the first words of a GPU's
name; the longest that fits counts."""


class Language:
    """A transformer on bytes of text."""

    samples = "rows"
    settings = Gpt

    def prepare_options(self, model: Gpt) -> dict[str, Any]:
        return {"row_bytes": model.context_length + 1}

    def build(self, model: Gpt) -> nn.Module:
        return Transformer(model)

    def check(self, model: Gpt) -> int:
        return parameters_of(model)

    def check_fit(self, model: Gpt, images: DatasetInfo) -> None:
        if images.kind != "text":
            raise ConfigError(
                f"{images.source} has images, and train.recipe = language_model learns from text. "
                "Use text, or train.recipe: image_classification."
            )
        found = images.bytes_per_sample - 1
        if found != model.context_length:
            raise ConfigError(
                f"train.model.context_length = {model.context_length}, but {images.source} is prepared for "
                f"{found}: use {found}, or prepare it again."
            )

    def takes_one_sample(self, model: Gpt) -> bool:
        return True

    def title(self, model: Gpt) -> str:
        return title_of(model)

    def describe(self, images: DatasetInfo) -> str:
        return f"rows of {images.bytes_per_sample - 1} bytes of text"

    def metadata(self, model: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
        return {
            "source": images["source"],
            "input": {"shape": [None, None], "dtype": "int64"},
            "preprocessing": [
                "encode text as UTF-8; each byte is a number from 0 to 255, and 0 begins a document",
                f"give up to {model['context_length']} of them: scores at a place are of the next byte",
            ],
        }

    def worker_task(
        self, config: TrainerConfig, images: DatasetInfo, device: torch.device
    ) -> LanguageModelTask:
        assert isinstance(config.train, LanguageModel)
        return LanguageModelTask(config.train.model, device)

    def speeds(self, model: Gpt, samples_per_s: float, worker: Worker | None) -> dict[str, float]:
        """`tokens_per_s`, of which each byte is one; and `mfu` on GPUs whose peak is known.

        MFU is the share of that peak that the model's own arithmetic takes (Chowdhery et al.: PaLM, 2022,
        appendix B).
        """
        tokens = samples_per_s * model.context_length
        speeds = {"tokens_per_s": tokens}
        peak = peak_flops(worker.device) if worker else None
        if worker and peak:
            speeds["mfu"] = tokens * flops_per_token(model) / (worker.world_size * peak)
        return speeds

    def report(
        self,
        folder: RunFolder,
        config: TrainerConfig,
        data: Prepared,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        from trainyard_trainer.recipes.language_model.report import find

        return find(folder, config, data, summary, validation)


class LanguageModelTask:
    """Next-byte prediction: inputs are a row without its last byte, targets a row without its first byte."""

    def __init__(self, model: Gpt, device: torch.device) -> None:
        self.model = model
        self.device = device

    def build(self) -> nn.Module:
        return Transformer(self.model)

    def inputs(self, batch: Batch, *, epoch: int | None = None) -> torch.Tensor:
        return rows_of(batch)[:, :-1]

    def empty_inputs(self) -> torch.Tensor:
        return torch.zeros(1, self.model.context_length, dtype=torch.int64, device=self.device)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> BatchLoss:
        right = rows_of(batch)[:, 1:]
        return BatchLoss(
            loss=functional.cross_entropy(outputs.flatten(0, 1), right.flatten()),
            num_correct=(outputs.argmax(dim=2) == right).sum(),
            num_targets=right.numel(),
        )

    def metrics(self, worker: Worker) -> LanguageModelMetrics:
        return LanguageModelMetrics(self, worker)


class LanguageModelMetrics:
    """Accumulates loss and accuracy over the bytes of one worker's share of validation rows."""

    def __init__(self, task: LanguageModelTask, worker: Worker) -> None:
        self.task = task
        self.worker = worker
        # Loss times bytes, correct bytes, bytes, rows.
        self.sums = torch.zeros(4, dtype=torch.float64, device=worker.device)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Add the outputs (N, context_length, 256), in float32, for a batch."""
        found = self.task.loss(outputs, batch)
        self.sums[0] += found.loss * found.num_targets
        self.sums[1] += found.num_correct
        self.sums[2] += found.num_targets
        self.sums[3] += len(batch.pixels)

    def compute(self) -> Validation:
        """Return the metrics over all workers. All workers must call it."""
        loss, num_correct, count, rows = self.worker.sum(self.sums.clone()).tolist()
        return Validation(
            num_samples=int(rows),
            loss=loss / count,
            accuracy=num_correct / count,
            confusion=(),
            worst=(),
        )


def rows_of(batch: Batch) -> torch.Tensor:
    """Bytes of text, (N, context_length + 1) int64."""
    return batch.pixels.flatten(1).long()


@cache
def parameters_of(model: Gpt) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(model).parameters())


def flops_per_token(model: Gpt) -> int:
    """Of a forward and backward pass: 6 per parameter, and 12 per layer, width and byte of context."""
    return 6 * parameters_of(model) + 12 * model.layers * model.width * model.context_length


def peak_flops(device: torch.device) -> float | None:
    """None where nobody has said, as of a CPU or a part of a GPU (MIG)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if " MIG " in name:
        return None
    known = [words for words in PEAK_FLOPS if _begins_with(name, words)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def _begins_with(name: str, words: str) -> bool:
    """`NVIDIA A100-SXM4-80GB` begins with `NVIDIA A100`, `NVIDIA A10G` not with `NVIDIA A10`."""
    return name == words or name.startswith((f"{words} ", f"{words}-"))
