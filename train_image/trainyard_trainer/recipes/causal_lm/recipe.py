"""The recipe `causal_lm`: which token of a chat or a text comes next, for a model of Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from typing_extensions import Self

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.metric import ANSWERS, Metric
from trainyard_trainer.config.training.models import CausalModel
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.rows import DataInfo, RunData
from trainyard_trainer.data.prepared import Prepared, PromptAs, TokenInfo
from trainyard_trainer.data.sources.chats.examples import Question, WrongRow
from trainyard_trainer.data.sources.chats.token_format import TokenFormat, require_fit
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.causal_lm.documents import IGNORED, documents_of
from trainyard_trainer.recipes.causal_lm.folder import (
    read_config,
    require_separate_texts,
)
from trainyard_trainer.recipes.causal_lm.memory import require_memory
from trainyard_trainer.recipes.causal_lm.model_folder import ModelFolder
from trainyard_trainer.recipes.causal_lm.stored_weights import check_weights
from trainyard_trainer.recipes.causal_lm.texts.generation import continued
from trainyard_trainer.recipes.causal_lm.texts.prompts import TEXTS, Prompts, prompts_of
from trainyard_trainer.recipes.causal_lm.texts.questions import (
    GIVEN_ANSWERS,
    Examination,
    KnownAnswer,
    read_questions,
)
from trainyard_trainer.recipes.causal_lm.weights import build_network, load_shards
from trainyard_trainer.recipes.loss import Loss, Sums
from trainyard_trainer.recipes.recipe import Forward, Recipe
from trainyard_trainer.run_folder.attempt_scope import say
from trainyard_trainer.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from trainyard_trainer.report.page import RecipeReport

TEMPERATURES = (0.0, 1.0)
"""The most likely text, and one as the model has learnt them."""

PROMPT_TOKENS = 64
"""The largest number of tokens behind a prompt at a validation."""

BASE = "base_model.json"
"""The file in a run's folder with the hash of the model from which the run started."""


class CausalLanguage(Recipe[CausalModel]):
    """Fine-tuning of a language model of Transformers: all of its weights, or an adapter."""

    settings = CausalModel
    samples = "rows"

    def __init__(self, config: CausalModel, info: DataInfo | None = None) -> None:
        super().__init__(config, info)
        self._train: CausalLm | None = None
        self._endpoint: str | None = None
        self._use_gpu = torch.cuda.is_available()
        self._answers_to_show: list[dict[str, Any]] = []
        self.model = ModelFolder(path=config.path, endpoint=config.endpoint)

    @classmethod
    def of_run(cls, run: TrainerConfig, info: DataInfo | None) -> Self:
        assert isinstance(run.train, CausalLm)
        recipe = cls(run.train.model, info)
        recipe._train = run.train
        recipe._endpoint = run.storage.endpoint
        recipe._use_gpu = run.scaling.use_gpu
        recipe.model = replace(
            recipe.model, endpoint=run.train.model.endpoint or run.storage.endpoint, say=say
        )
        return recipe

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        """With questions, the share of correct answers."""
        return CausalLm.metrics_of(self._train) if self._train else ()

    @property
    def saves_frozen_weights(self) -> bool:  # type: ignore[override]
        """Whether checkpoints hold all weights; those of an adapter do not hold the model's."""
        return self.config.adapter is None

    def build_model(self) -> nn.Module:
        """Build the network. In a training worker, raise ConfigError if its GPU has too little memory."""
        train, config = self._train, self.config
        if train and self._use_gpu and distributed.is_initialized():
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            workers = distributed.get_world_size()
            require_memory(
                train,
                self.model.without_weights(),
                num_workers=workers,
                gpu_bytes=gpu.total_memory,
            )
        if train is None and config.adapter is None:
            # All weights come from the checkpoint.
            config = config.model_copy(update={"init": "random"})
        needs_weights = config.init == "pretrained" and torch.get_default_device().type != "meta"
        path = self.model.whole() if needs_weights else self.model.without_weights()
        return build_network(
            config.model_copy(update={"path": path}),
            seed=train.seed if train else 0,
            is_sharded=train is not None and train.strategy == "fsdp2",
        )

    def first_weights(self) -> str:
        if self.config.init == "random":
            return super().first_weights()
        return f"the weights of {self.config.path}"

    def load_weights(self, network: nn.Module) -> None:
        assert self._train is not None
        load_shards(network, self.model.whole(), self._train.seed)  # type: ignore[arg-type]

    def loss(self, model: Forward, batch: Batch) -> Loss:
        tokens, flags = batch["tokens"], batch["flags"]
        documents = documents_of(tokens, flags)
        return Loss(
            sum=model(tokens, documents),
            weight=(documents.targets != IGNORED).sum(),
        )

    def loss_weight(self, batch: Batch) -> Tensor:
        """Return the number of tokens that are learnt, a scalar."""
        return (documents_of(batch["tokens"], batch["flags"]).targets != IGNORED).sum()

    def measure(self, model: Forward, worker: Worker) -> Mapping[str, Sums]:
        """Ask the questions of the run file: each worker a share of them, in batches of the validation."""
        train = self._train
        if train is None or train.questions is None:
            return {}
        share = share_batch(train, worker.world_size)
        examination = Examination(
            self._questions,
            train.questions,
            self._prompts,
            # Without gradients, more samples fit into memory than in training.
            batch_size=2 * share.micro_batch_size,
        )
        is_sharded = train.strategy != "ddp"
        result = examination.run(model, worker, is_sharded=is_sharded)
        self._answers_to_show = [each.to_json() for each in examination.shown]
        return {ANSWERS.name: result}

    @property
    def prompt_as(self) -> PromptAs | None:
        """What a prompt has to be to look as in training; None before the data are known."""
        return self.token_info.prompt_as if self._info else None

    @property
    def _prompts(self) -> Prompts:
        return prompts_of(self.model.without_weights(), self.prompt_as)

    @cached_property
    def _questions(self) -> Sequence[KnownAnswer]:
        """The questions of the run file."""
        return self._read_questions()

    def _read_questions(self) -> Sequence[KnownAnswer]:
        """Read the questions of the run file. Raises ConfigError for rows that cannot be used."""
        train = self._train
        assert train is not None
        assert train.questions is not None
        return read_questions(
            train.questions,
            self._prompts,
            context_length=train.context_length,
            endpoint=self._endpoint,
        )

    def demonstrate(self, model: Forward, *, step: int) -> dict[str, Any]:
        """Continue the prompts of the run file at each of `TEMPERATURES`; show answers to its questions."""
        train = self._train
        answered = {GIVEN_ANSWERS: self._answers_to_show} if self._answers_to_show else {}
        if train is None or not train.prompts:
            return answered
        prompts = self._prompts
        length = min(PROMPT_TOKENS, train.context_length // 2)
        tokens = [each[length - train.context_length :] for each in self._prompt_tokens(prompts)]
        device = torch.device("cuda" if self._use_gpu else "cpu")
        texts = []
        for temperature in TEMPERATURES:
            found = continued(
                model,
                tokens,
                length=length,
                temperature=temperature,
                # The texts of each validation are drawn with other random numbers.
                seed=train.seed * 1_000_003 + step,
                ends=prompts.ends,
                padding=prompts.padding,
                device=device,
                # Workers that share a model have to call it equally often.
                unfinished=lambda count: count if train.strategy == "ddp" else 1,
            )
            texts += [
                {"prompt": prompt, "temperature": temperature, "text": prompts.text_of(text)}
                for prompt, text in zip(train.prompts, found, strict=True)
            ]
        return {**answered, TEXTS: texts}

    def _prompt_tokens(self, prompts: Prompts) -> list[list[int]]:
        """Return the tokens of the prompts of the run file. Raises ConfigError if one has none."""
        assert self._train is not None
        found = []
        for number, prompt in enumerate(self._train.prompts):
            try:
                found.append(prompts.of_question(Question(prompt=prompt)))
            except WrongRow as reason:
                raise ConfigError(f"train.prompts[{number}] = {prompt!r}: {reason}") from None
        return found

    def parameter_groups(self, model: nn.Module) -> Iterable[Tensor | dict[str, Any]]:
        """Leave biases and the weights of norms out of the decay, as Transformers and TRL do."""
        trained = [each for each in model.parameters() if each.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [each for each in trained if each.dim() > 1]},
            {"params": [each for each in trained if each.dim() <= 1], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    # Before training.

    def prepare_options(self) -> dict[str, Any]:
        train = self._train
        assert train is not None
        return {
            "tokens": TokenFormat(
                tokenizer=self.config.path,
                folder=self.model.without_weights(),
                context_length=train.context_length,
                packing=train.packing,
                loss_on=train.loss_on,
                too_long=train.too_long,
                seed=train.seed,
            )
        }

    def pinned_model(self, folder: RunFolder) -> CausalModel:
        """Return the settings with the commit of a model of the hub, that of the first start of the run."""
        path = f"{folder.root}/{BASE}"
        if self.model.is_remote and folder.exists(folder.run) and folder.exists(path):
            pinned = json.loads(folder.read(path))["path"]
        else:
            pinned = self.model.pinned()
        return self.config.model_copy(update={"path": pinned})

    def prepare(self, folder: RunFolder, say: Callable[[str], None]) -> None:
        """Record the model from which the run starts, and its hash, which of a remote one follows later."""
        if self.model.is_remote:
            path = f"{folder.root}/{BASE}"
            known = json.loads(folder.read(path)) if folder.exists(path) else {}
            if known.get("path") != self.config.path:
                folder.write(path, json.dumps({"path": self.config.path}, indent=2))
        elif self.config.init == "pretrained":
            self._record_hash(folder, self.model.sha256)

    @property
    def fetches_files(self) -> bool:
        return self.model.is_remote and self.config.init == "pretrained"

    def fetch(self) -> str:
        self._check_weights(self.model.whole())
        return self.model.sha256()

    def _check_weights(self, folder: str) -> None:
        """Print a note about weights that are left out. Raises ConfigError if they do not fit."""
        if note := check_weights(folder):
            self.model.say(note)

    def note_fetched(self, folder: RunFolder, sha256: Collection[str]) -> None:
        """Record the hash of the model that all nodes have fetched."""
        if len({*sha256}) > 1:
            raise RunError(
                f"train.model.path = {self.config.path}: nodes have fetched different files. It was changed "
                "meanwhile: start again when nobody writes there."
            )
        if sha256:
            self._record_hash(folder, lambda: next(iter(sha256)))

    def _record_hash(self, folder: RunFolder, compute: Callable[[], str]) -> None:
        """Record the hash of the model from which the run starts.

        The checkpoints of an adapter are of use with that model alone. Raises ConfigError for another one.
        """
        path = f"{folder.root}/{BASE}"
        known = json.loads(folder.read(path)) if folder.exists(path) else {}
        if "sha256" in known and self.saves_frozen_weights:
            return
        found = {"path": self.config.path, "sha256": compute()}
        if "sha256" not in known:
            folder.write(path, json.dumps(found, indent=2))
        elif known["sha256"] != found["sha256"]:
            raise ConfigError(
                f"train.model.path = {self.config.path} holds another model than the one whose adapter this "
                f"run trains: SHA-256 {found['sha256'][:12]}, and {known['sha256'][:12]} at its start.\n"
                "       Put the first model back, or give this run another name (--name)."
            )

    def check(self) -> int:
        config, known = self.config, read_config(self.model.without_weights())
        if config.attention == "flash" and find_spec("flash_attn") is None:
            raise ConfigError(
                "train.model.attention = flash needs the package flash-attn, which is not installed.\n"
                "       Build an image with it, or use sdpa or flex."
            )
        if config.attention == "flex" and not self._use_gpu:
            raise ConfigError(
                "train.model.attention = flex needs GPUs: PyTorch has no backward pass of it for CPUs. "
                "Use sdpa."
            )
        if self._train and self._train.packing:
            require_separate_texts(config.path, known)
        longest = getattr(known, "max_position_embeddings", None)
        if self._train and longest and self._train.context_length > longest:
            raise ConfigError(
                f"train.context_length = {self._train.context_length:,} is more than the {longest:,} "
                f"positions of {config.path}. Use {longest} or less."
            )
        if config.init == "pretrained" and self.model.is_remote:
            self.model.require_weights()
        elif config.init == "pretrained":
            self._check_weights(config.path)
        if self._train and self._train.questions:
            self._read_questions()
        return super().check()

    def check_fit(self) -> None:
        require_fit(self.token_info, self.prepare_options()["tokens"])
        words = read_config(self.model.without_weights()).get_text_config().vocab_size
        if self.token_info.vocab_size > words:
            raise ConfigError(
                f"train.model.path = {self.config.path}: its tokenizer has {self.token_info.vocab_size:,} "
                f"tokens, and its model {words:,}. Use the tokenizer that belongs to the model."
            )
        # The tokens of prompts and questions depend on the rows of the data.
        if self._train and self._train.prompts:
            self._prompt_tokens(self._prompts)
        if self._train and self._train.questions:
            self._read_questions()

    # Messages and results.

    @property
    def token_info(self) -> TokenInfo:
        """Format and statistics of the tokens."""
        assert isinstance(self.info, TokenInfo)
        return self.info

    def title(self) -> str:
        config, name = self.config, self.model.name
        if config.adapter is None:
            return f"{name}, {config.init} weights"
        return f"{name} with LoRA of rank {config.adapter.rank}"

    def describe(self) -> str:
        return f"rows of {self.token_info.row_tokens:,} tokens"

    def metadata(self) -> dict[str, Any]:
        return {"source": self.info.source, "tokens": asdict(self.token_info)}

    def speeds(self, samples_per_s: float) -> dict[str, float]:
        """Return `tokens_per_s`, in which padding counts."""
        train = self._train
        return {"tokens_per_s": samples_per_s * train.context_length} if train else {}

    def report(
        self,
        folder: RunFolder,
        run: TrainerConfig,
        data: RunData,
        summary: dict[str, Any],
        validation: dict[str, Any],
    ) -> RecipeReport:
        assert isinstance(data, Prepared)
        from trainyard_trainer.recipes.causal_lm.report import make_report

        return make_report(folder, data, self.token_info, self.title(), summary, validation)

    def flops_per_sample(self) -> float:
        """Return 6 FLOPs per parameter and token, 4 if it is frozen, and 12 per layer, width and position.

        Frozen weights need no gradients (Chowdhery et al.: PaLM, 2022, appendix B, without these).
        """
        known = read_config(self.model.without_weights()).get_text_config()
        length = self.token_info.row_tokens
        attention = 12 * known.num_hidden_layers * known.hidden_size * length
        return float((self._products_per_token + attention) * length)

    @cached_property
    def _products_per_token(self) -> int:
        """The FLOPs of the weights for each token. It takes seconds to build a large model."""
        with torch.device("meta"):
            weights = [*self.build_model().parameters()]
        return sum((6 if each.requires_grad else 4) * each.numel() for each in weights)
