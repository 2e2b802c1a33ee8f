"""`train` of the recipes that train a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.data import Data, require_known
from trainyard_trainer.config.models import Gpt, Model
from trainyard_trainer.config.optimizers import AdamW, Constant, Cosine, Optimizer, Sgd, Steps
from trainyard_trainer.config.section import Fraction, Metric, NotNegative, PositiveNumber, Section
from trainyard_trainer.config.strategies import DeepSpeedConfig, Fsdp2Config


class EarlyStopping(Section):
    """Stop when validation has not become better for some epochs."""

    metric: Metric = "val_loss"
    """What must become better: `val_loss` lower, `val_accuracy` higher."""

    patience_epochs: PositiveInt
    """Epochs without an improvement after which the run ends."""

    min_delta: NotNegative = 0.0
    """Changes up to this size are no improvement."""


class Train(Section):
    """What every recipe has that trains a network."""

    no_use_for: ClassVar[tuple[str, ...]] = ()
    """Keys of `data` that mean nothing to the recipe."""

    recipe: str
    """What is learnt."""

    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """How the model is spread over workers: `ddp` copies it to each, with `fsdp2` each keeps a share of its
    weights, gradients and optimiser, with `deepspeed` of as much of that as its stage says."""

    fsdp2: Fsdp2Config | None = None
    """Settings of `strategy: fsdp2`."""

    deepspeed: DeepSpeedConfig | None = None
    """Settings of `strategy: deepspeed`."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of initial weights, sample order and all that is drawn at random."""

    epochs: PositiveInt
    """How often each sample is seen."""

    global_batch_size: PositiveInt
    """Samples per optimiser step over all workers together; it must be a multiple of their number."""

    micro_batch_size: PositiveInt | None = None
    """Samples that a worker computes at once; gradients of several such parts are added up. It must divide a
    worker's share of the global batch; without it that share is computed at once."""

    optimizer: Optimizer = Sgd(name="sgd")

    schedule: Cosine | Steps | Constant = Field(default=Cosine(name="cosine"), discriminator="name")
    """How the learning rate changes: `{name: cosine}`, `{name: step, every_samples: N}` or
    `{name: constant}`."""

    clip_norm: PositiveNumber | None = None
    """Longest gradient, over all weights together (2-norm); longer ones are shortened to it."""

    ema_decay: Annotated[float, Field(gt=0, lt=1, strict=False)] | None = None
    """Validate and deliver a moving average of the weights, which keeps so much of itself at each step."""

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Numbers of the forward pass; `auto` is bf16 on a GPU that has it, fp32 elsewhere."""

    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster afterwards on GPUs."""

    early_stopping: EarlyStopping | None = None
    """End the run before its last epoch."""

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
    """A torchvision model learns which class an image is of."""

    no_use_for = ("text_files",)

    recipe: Literal["image_classification"] = "image_classification"
    """What is learnt: the class of an image."""

    model: Model
    """The network."""

    label_smoothing: Fraction = 0.0
    """Share of each label that is spread over all classes."""

    channels_last: bool = False
    """Keep the channels of a pixel side by side in memory: faster convolutions on most GPUs."""


class LanguageModel(Train):
    """A transformer learns which byte of a text comes next."""

    no_use_for = ("augment", "image_column", "label_column", "max_bad_samples")

    recipe: Literal["language_model"]
    """What is learnt: the next byte of a text."""

    model: Gpt
    """The network."""

    optimizer: Optimizer = AdamW(name="adamw")


def require_fit(data: Data, train: Train) -> None:
    """Raises PydanticCustomError if `data` has what the recipe has no use for."""
    for key in train.no_use_for:
        if getattr(data, key) != Data.model_fields[key].get_default():
            raise PydanticCustomError(
                "one_of", f"data.{key} means nothing to train.recipe = {train.recipe}: remove it"
            )
    require_known(data, train.recipe)


def has_fixed_workers(train: Any) -> bool:
    """Whether a `train` section, read or not, has a run keep its number of workers for good."""
    if isinstance(train, Train):
        return train.strategy == "deepspeed"
    return isinstance(train, Mapping) and train.get("strategy") == "deepspeed"


def require_one_size(train: Train, unit: str, *, is_elastic: bool) -> None:
    """Raises PydanticCustomError if workers may come and go in a run that cannot change their number."""
    if is_elastic and has_fixed_workers(train):
        raise PydanticCustomError(
            "one_of",
            f"train.strategy = {train.strategy} cannot change its number of workers: "
            f"make {unit} one number, or use strategy fsdp2",
        )
