"""The recipe `language_model`: which byte, or which token, of a text comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import Self

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.config.training.train import LanguageModel
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import DataInfo, RunData
from trainyard_trainer.data.prepared import Prepared, TokenStreamInfo
from trainyard_trainer.data.sources.tokens.stream_format import StreamFormat, require_stream
from trainyard_trainer.data.sources.tokens.token_files import TokenShards
from trainyard_trainer.data.sources.tokens.tokenizer_address import TokenizerAddress
from trainyard_trainer.data.sources.tokens.tokenizer_folder import TOKENIZER_KEY, text_tokenizer
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.example_inputs import ExampleInputs
from trainyard_trainer.recipes.language_model.codec import save_tokenizer, saved_address
from trainyard_trainer.recipes.language_model.model import (
    BYTES,
    Transformer,
    Vocabulary,
    title_of,
)
from trainyard_trainer.recipes.loss import Loss
from trainyard_trainer.recipes.recipe import Forward, Recipe
from trainyard_trainer.run_files.names import TOKENIZER
from trainyard_trainer.run_folder.attempt_scope import say
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

EXAMPLE_LENGTH = 32
"""The length of example inputs in tokens, if the context length is not shorter."""


class Language(Recipe[Gpt]):
    """A transformer on text: it predicts each byte, or token, of a row but the first."""

    settings = Gpt
    samples = "rows"
    metrics = LanguageModel.metrics

    def __init__(self, config: Gpt, info: DataInfo | None = None) -> None:
        super().__init__(config, info)
        self._endpoint = config.endpoint

    @classmethod
    def of_run(cls, run: TrainerConfig, info: DataInfo | None) -> Self:
        recipe = super().of_run(run, info)
        recipe._endpoint = recipe.config.endpoint or run.storage.endpoint
        return recipe

    @property
    def _tokenizer(self) -> TokenizerAddress | None:
        """Where the tokenizer lies; None if there is none."""
        if self.config.tokenizer is None:
            return None
        return TokenizerAddress(
            path=self.config.tokenizer,
            endpoint=self._endpoint,
            names=(TOKENIZER_KEY, "train.model.endpoint"),
            say=say,
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the data, or before these are prepared those of the tokenizer's folder."""
        config = self.config
        if not config.has_tokens:
            return BYTES
        info = self._info
        if isinstance(info, TokenStreamInfo):
            return Vocabulary(config.vocab_size or info.vocab_size, info.end_of_text)
        if self._tokenizer is not None:
            tokenizer = text_tokenizer(self._tokenizer.folder())
            return Vocabulary(config.vocab_size or tokenizer.vocab_size, tokenizer.end_of_text)
        assert config.vocab_size is not None
        return Vocabulary(config.vocab_size, config.end_of_text)

    def build_model(self) -> nn.Module:
        return Transformer(self.config, self.vocabulary)

    def loss(self, model: Forward, batch: Batch) -> Loss:
        rows = batch[self._column].long()  # (N, context_length + 1)
        targets = rows[:, 1:]
        scores = model(rows[:, :-1])  # (N, context_length, vocabulary)
        num_correct = (scores.argmax(dim=2) == targets).sum()
        return Loss(
            sum=functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"),
            weight=targets.numel(),
            metrics={"accuracy": (num_correct, targets.numel())},
        )

    @property
    def _column(self) -> str:
        """The column of a batch that has the rows."""
        return "tokens" if self.config.has_tokens else "text"

    def example_inputs(self, count: int) -> ExampleInputs:
        """Return rows of many short documents: without a tokenizer, bytes of 0 separate them."""
        length = min(self.config.context_length, EXAMPLE_LENGTH)
        generator = torch.Generator().manual_seed(0)
        return ExampleInputs(
            tensors={self._column: torch.randint(8, (count, length), generator=generator)},
            free_axes={1: self.config.context_length},
        )

    def prepare_options(self) -> dict[str, Any]:
        if not self.config.has_tokens:
            return {"row_bytes": self.config.context_length + 1}
        return {"stream": self._stream_format}

    @property
    def _stream_format(self) -> StreamFormat:
        config = self.config
        return StreamFormat(
            tokenizer=config.tokenizer,
            folder=self._tokenizer.folder() if self._tokenizer else None,
            context_length=config.context_length,
            vocab_size=config.vocab_size if config.tokenizer is None else None,
            end_of_text=config.end_of_text,
        )

    def prepare(self, folder: RunFolder, say: Callable[[str], None]) -> None:
        """Copy the tokenizer into the run's folder, so that the model can be used without the original."""
        if self._tokenizer is not None:
            save_tokenizer(folder, self._tokenizer)

    def pinned_model(self, folder: RunFolder) -> Gpt:
        """Return the settings with the commit of a tokenizer of the hub at the first start of the run."""
        if self._tokenizer is None:
            return self.config
        pinned = saved_address(folder) or self._tokenizer.pinned().path
        return self.config.model_copy(update={"tokenizer": pinned})

    def check(self) -> int:
        return parameters_of(self.config, self.vocabulary)

    def check_fit(self) -> None:
        if self.config.has_tokens:
            require_stream(self.stream_info, self._stream_format)
            known = self.stream_info.vocab_size
            if self.vocabulary.size < known:
                raise ConfigError(
                    f"train.model.vocab_size = {self.vocabulary.size:,} is less than the {known:,} tokens of "
                    f"{self.config.tokenizer}. Use {known} or more, or leave it out."
                )
            return
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

    @property
    def stream_info(self) -> TokenStreamInfo:
        """Format and statistics of the tokens that a tokenizer has made."""
        assert isinstance(self.info, TokenStreamInfo)
        return self.info

    def describe(self) -> str:
        if self.config.has_tokens:
            return f"rows of {self.stream_info.row_tokens - 1:,} tokens"
        return f"rows of {self.prepared_info.bytes_per_sample - 1} bytes of text"

    def metadata(self) -> dict[str, Any]:
        length = self.config.context_length
        facts = {
            "source": self.info.source,
            "input": {"shape": [None, None], "dtype": "int64"},
            "preprocessing": [
                "encode text as UTF-8; each byte is a number from 0 to 255, and 0 begins a document",
                f"give up to {length} of them: scores at a place are of the next byte",
            ],
        }
        if not self.config.has_tokens:
            return facts
        tokenizer = f"the tokenizer in {TOKENIZER} of the run's folder"
        if self.config.tokenizer is None:
            tokenizer = "the tokenizer that has made the files of tokens"
        separator = self.vocabulary.separator
        begin = "" if separator is None else f"; {separator} begins a document"
        return facts | {
            "tokens": asdict(self.stream_info),
            "preprocessing": [
                f"encode text with {tokenizer}{begin}",
                f"give up to {length} tokens: scores at a place are of the next token",
            ],
        }

    def speeds(self, samples_per_s: float) -> dict[str, float]:
        """Return `tokens_per_s`; without a tokenizer, each byte is a token."""
        return {"tokens_per_s": samples_per_s * self.config.context_length}

    def flops_per_sample(self) -> float:
        return float(flops_per_token(self.config, self.vocabulary) * self.config.context_length)

    def report(
        self,
        folder: RunFolder,
        run: TrainerConfig,
        data: RunData,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        assert isinstance(data, Prepared | TokenShards)
        from trainyard_trainer.recipes.language_model.report import find

        return find(folder, run, data, self.vocabulary, summary, validation)


@cache
def parameters_of(model: Gpt, vocabulary: Vocabulary = BYTES) -> int:
    """Return the number of parameters of a network."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(model, vocabulary).parameters())


def flops_per_token(model: Gpt, vocabulary: Vocabulary = BYTES) -> int:
    """Return the FLOPs of a forward and backward pass: 6 per parameter, and 12 per layer, width and token."""
    attention = 12 * model.layers * model.width * model.context_length
    return 6 * parameters_of(model, vocabulary) + attention
