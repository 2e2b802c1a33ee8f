"""The section `train` of the recipes that train a neural network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from trainyard_trainer.config.checkpoint import CheckpointConfig
from trainyard_trainer.config.data.section import Data, require_known, require_stream_fits
from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.config.location import HUB, is_remote
from trainyard_trainer.config.section import (
    Endpoint,
    Fraction,
    Location,
    MetricName,
    NotNegative,
    PositiveNumber,
    Section,
)
from trainyard_trainer.config.training.metric import ACCURACY, ANSWERS, Metric, goals_of
from trainyard_trainer.config.training.models import CausalModel, Gpt, Model, ModelLocation
from trainyard_trainer.config.training.optimizers import (
    AdamW,
    AnyOptimizer,
    Constant,
    Cosine,
    Optimizer,
    Sgd,
    Steps,
)
from trainyard_trainer.config.training.strategies import DeepSpeedConfig, Fsdp2Config


class EarlyStopping(Section):
    """Stop training when a validation metric has not improved for some epochs."""

    metric: MetricName = "val_loss"
    """The metric that has to improve: `val_loss`, or a metric of the recipe on the validation samples, such
    as `val_accuracy`."""

    patience_epochs: PositiveInt
    """The number of epochs without an improvement after which the run ends."""

    min_delta: NotNegative = 0.0
    """The change that an improvement has to exceed."""


class InitialWeights(Section):
    """A file with the weights from which a run starts, such as those of a pretrained model."""

    path: ModelLocation
    """A file of safetensors, or of PyTorch with a state_dict: its path, or `s3://bucket/file`. Or a model of
    the Hugging Face Hub: `hf://org/name@revision`."""

    file: str | None = None
    """The file of a model of the Hub. The default is `model.safetensors`."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of the file. The default is the endpoint of the storage, or AWS."""

    key: str | None = None
    """The key under which a file of PyTorch holds the state_dict, such as `state_dict`. The default is none:
    the file is a state_dict."""

    prefix: str = ""
    """The beginning of the names in the file that the names of the model lack, such as `module.`."""

    skip: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of names such as `fc.*`. Tensors of the model with these names keep their random values, and
    those of the file are not read."""

    @model_validator(mode="after")
    def _names_a_file(self) -> InitialWeights:
        if self.file is not None and not self.path.startswith(HUB):
            raise PydanticCustomError(
                "one_of",
                "file = {file} is for a model of the Hub, and path = {path} is none: name the file in path",
                {"file": self.file, "path": self.path},
            )
        return self


class Questions(Section):
    """A file of questions with known answers, which the model is asked at each validation."""

    path: Location
    """JSON lines, a JSON list, Parquet or Arrow, with `prompt` or `messages` and `answer` in each row: its
    path, or `s3://bucket/file`."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of the file. The default is the endpoint of the storage, or AWS."""

    match: Literal["exact", "regex", "choice"] = "exact"
    """When an answer is correct: it is the text `answer`, without white space around it (`exact`); the
    regular expression `answer` is found in it (`regex`); or the model gives the text `answer` the highest
    probability of all `choices` of the row (`choice`), without writing anything."""

    max_tokens: PositiveInt = 64
    """The largest number of tokens that the model writes. `match: choice` does not need it."""


class Train(Section):
    """The settings that all recipes for neural networks share."""

    no_use_for: ClassVar[tuple[str, ...]] = ()
    """Keys of `data` that the recipe does not use."""

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The recipe's metrics beside the loss."""

    recipe: str
    """The name of the recipe."""

    model: Any
    """The settings of the recipe's model."""

    init: InitialWeights | None = None
    """The file with the weights from which the run starts. The default is random weights."""

    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """How the model is distributed over workers: `ddp` replicates it; `fsdp2` shards weights, gradients and
    optimizer state; `deepspeed` shards as much of these as its stage says."""

    fsdp2: Fsdp2Config | None = None
    """Settings of `strategy: fsdp2`."""

    deepspeed: DeepSpeedConfig | None = None
    """Settings of `strategy: deepspeed`."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of the initial weights, of the sample order and of all other random numbers."""

    epochs: PositiveInt
    """The number of passes over the training data."""

    global_batch_size: PositiveInt
    """The number of samples per optimizer step over all workers; a multiple of the number of workers."""

    micro_batch_size: PositiveInt | None = None
    """The number of samples per forward and backward pass of a worker; gradients are accumulated over passes.
    It must divide a worker's share of the global batch. The default is the whole share."""

    optimizer: Optimizer = Sgd(name="sgd")

    schedule: Cosine | Steps | Constant = Field(default=Cosine(name="cosine"), discriminator="name")
    """The learning-rate schedule: `{name: cosine}`, `{name: step, every_samples: N}` or
    `{name: constant}`."""

    clip_norm: PositiveNumber | None = None
    """The largest 2-norm of the gradient over all weights; larger gradients are scaled down to it."""

    ema_decay: Annotated[float, Field(gt=0, lt=1, strict=False)] | None = None
    """The decay of an exponential moving average of the weights, which is then validated and delivered."""

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """The number format of the forward pass. `auto` is bf16 on GPUs that support it, and fp32 elsewhere."""

    compile: bool = False
    """Compile the model with torch.compile: it starts more slowly, and trains faster on GPUs."""

    early_stopping: EarlyStopping | None = None
    """Settings to end the run before its last epoch."""

    @classmethod
    def metrics_of(cls, train: Any) -> tuple[Metric, ...]:
        """Return the metrics of a `train` section of this recipe, read or as JSON."""
        return cls.metrics

    def absolute(self) -> Self:
        """Return the same with absolute paths, so that it does not depend on the working directory."""
        if self.init is None or is_remote(self.init.path):
            return self
        init = self.init.model_copy(update={"path": absolute(self.init.path)})
        return self.model_copy(update={"init": init})

    def optimizer_of(self, network: str | None) -> AnyOptimizer:
        """Return the optimizer of one of the recipe's networks; None is the whole model."""
        return self.optimizer

    @model_validator(mode="after")
    def _fits_its_strategy(self) -> Train:
        for name in ("fsdp2", "deepspeed"):
            if getattr(self, name) is not None and self.strategy != name:
                raise PydanticCustomError(
                    "strategy", f"has settings of {name}, and strategy is {self.strategy}"
                )
        if self.strategy != "ddp" and self.precision == "fp16":
            raise PydanticCustomError(
                "strategy",
                f"precision = fp16 scales the loss, which strategy {self.strategy} does not do; "
                "use bf16, or ddp",
            )
        if self.strategy == "deepspeed" and (self.ema_decay is not None or self.compile):
            unfit = "compile" if self.compile else "ema_decay"
            raise PydanticCustomError(
                "strategy", f"{unfit} does not fit strategy deepspeed; remove it, or use fsdp2"
            )
        return self


class ImageClassification(Train):
    """Image classification with a torchvision model."""

    no_use_for = ("text_files",)
    metrics = (ACCURACY,)

    recipe: Literal["image_classification"] = "image_classification"
    """The recipe: predict the class of an image."""

    model: Model
    """The architecture of the model."""

    label_smoothing: Fraction = 0.0
    """The share of each label that is distributed evenly over all classes."""

    channels_last: bool = False
    """Store images in the channels-last memory format, in which convolutions are faster on most GPUs."""


class LanguageModel(Train):
    """Language modelling with a transformer on bytes, or on the tokens of a tokenizer."""

    no_use_for = ("augment", "image_column", "label_column", "max_bad_samples", "stream")
    metrics = (ACCURACY,)

    recipe: Literal["language_model"]
    """The recipe: predict the next byte, or the next token, of a text."""

    model: Gpt
    """The architecture of the model."""

    optimizer: Optimizer = AdamW(name="adamw")

    def absolute(self) -> Self:
        found = super().absolute()
        if self.model.tokenizer is None:
            return found
        tokenizer = absolute(self.model.tokenizer)
        return found.model_copy(
            update={"model": self.model.model_copy(update={"tokenizer": tokenizer})}
        )


class CausalLm(Train):
    """Fine-tuning of a language model of Transformers on chats, prompts or text."""

    no_use_for = ("augment", "image_column", "label_column", "stream", "text_files")

    recipe: Literal["causal_lm"]
    """The recipe: predict the next token of a chat or a text."""

    model: CausalModel
    """The model, and which of its weights are trained."""

    context_length: Annotated[int, Field(ge=2, le=2**20)]
    """The number of tokens of a sample."""

    packing: bool = True
    """Fill each sample with several rows of the data, which do not see each other. Otherwise each sample is
    one row, with padding behind it."""

    loss_on: Literal["answers", "all"] = "answers"
    """The tokens that are learnt: `answers` are the assistant's turns of a chat and the completions of
    prompts; `all` is every token. Of plain text, all tokens are learnt."""

    too_long: Literal["truncate", "split", "refuse"] = "truncate"
    """What becomes of a row with more tokens than the context length: its end is left out (`truncate`), it
    becomes several samples (`split`), or it counts as a bad sample (`refuse`)."""

    prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Prompts that the model continues after each validation, for the report. A prompt is a turn of the user
    if rows of the data are chats, else a text."""

    questions: Questions | None = None
    """Questions with known answers: `val_accuracy` is the share of them that the model answers correctly."""

    optimizer: Optimizer = AdamW(name="adamw")

    def absolute(self) -> Self:
        model = self.model.model_copy(update={"path": absolute(self.model.path)})
        questions = self.questions and self.questions.model_copy(
            update={"path": absolute(self.questions.path)}
        )
        return super().absolute().model_copy(update={"model": model, "questions": questions})

    @classmethod
    def metrics_of(cls, train: Any) -> tuple[Metric, ...]:
        is_read = isinstance(train, CausalLm)
        questions = train.questions if is_read else train.get("questions")
        return cls.metrics if questions is None else (ANSWERS,)

    @model_validator(mode="after")
    def _starts_from_its_folder(self) -> CausalLm:
        if self.init is not None:
            raise PydanticCustomError(
                "one_of",
                "init means nothing to recipe causal_lm, which starts from the weights in model.path",
            )
        if self.model.adapter is not None and self.ema_decay is not None:
            raise PydanticCustomError(
                "one_of", "ema_decay does not fit an adapter: remove one of them"
            )
        return self


def require_fit(data: Data, train: Train, checkpoint: CheckpointConfig) -> None:
    """Raise PydanticCustomError if `data` sets keys that the recipe does not use, or for unknown metrics."""
    require_goals(train, checkpoint, train.metrics_of(train))
    for key in train.no_use_for:
        if getattr(data, key) != Data.model_fields[key].get_default():
            raise PydanticCustomError(
                "one_of", f"data.{key} means nothing to train.recipe = {train.recipe}: remove it"
            )
    require_known(data, train.recipe)
    require_stream_fits(data)


def require_goals(train: Train, checkpoint: CheckpointConfig, metrics: Sequence[Metric]) -> None:
    """Raise PydanticCustomError if early stopping or `checkpoint.best` name a metric that is not there."""
    stopping = train.early_stopping
    for key, name in (
        ("checkpoint.best", checkpoint.best),
        ("train.early_stopping.metric", stopping.metric if stopping else None),
    ):
        require_metric(key, name, metrics)


def require_metric(key: str, name: str | None, metrics: Sequence[Metric]) -> None:
    """Raise PydanticCustomError if a key of the config names a metric that the recipe does not have."""
    known = goals_of(metrics)
    if name is not None and name not in known:
        raise PydanticCustomError(
            "one_of", f"{key} = {name} is no metric of the recipe: use {' or '.join(known)}"
        )


def has_fixed_workers(train: Any) -> bool:
    """Return whether a `train` section, parsed or not, fixes the number of workers of a run."""
    if isinstance(train, Train):
        return train.strategy == "deepspeed"
    return isinstance(train, Mapping) and train.get("strategy") == "deepspeed"


def require_one_size(train: Train, unit: str, *, is_elastic: bool) -> None:
    """Raise PydanticCustomError for an elastic run whose strategy cannot change the number of workers."""
    if is_elastic and has_fixed_workers(train):
        raise PydanticCustomError(
            "one_of",
            f"train.strategy = {train.strategy} cannot change its number of workers: "
            f"make {unit} one number, or use strategy fsdp2",
        )
