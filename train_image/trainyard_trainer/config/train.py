"""`train` of the recipes that train a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.data import Data, require_known
from trainyard_trainer.config.section import Fraction, Metric, NotNegative, PositiveNumber, Section


class Model(Section):
    """A torchvision classification model."""

    name: str
    """The model's name in torchvision, such as `resnet18`."""

    in_channels: PositiveInt
    """Channels of an image: 1 for grey, 3 for colour."""

    num_classes: PositiveInt
    """How many classes there are."""

    image_size: PositiveInt = 32
    """Side in pixels to which images are resized on the device."""


class Gpt(Section):
    """A transformer that reads bytes and tells the next one."""

    layers: PositiveInt
    """Blocks, each of attention and a network of two layers."""

    heads: PositiveInt
    """Heads of each attention; they share the width evenly."""

    width: PositiveInt
    """Numbers by which a byte is known between blocks."""

    context_length: Annotated[int, Field(ge=2, le=2**16)]
    """Bytes that the model looks back on at most, and bytes of a sample."""

    dropout: Fraction = 0.0
    """Share of the numbers between layers that are set to 0 at random in training."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Gpt:
        if self.width % self.heads:
            below = self.width // self.heads * self.heads or self.heads
            raise PydanticCustomError(
                "one_of",
                f"width = {self.width} cannot be shared evenly by heads = {self.heads}; "
                f"use a width of {below} or {below + self.heads}",
            )
        return self


class Sgd(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    """torch.optim.SGD."""

    learning_rate: PositiveNumber = 0.02
    """Step size at its highest; `train.schedule` says where it goes from there."""

    momentum: Fraction = 0.9
    """How much of the last step goes on."""

    weight_decay: NotNegative = 0.0005
    """Decay of the weights per step."""


class AdamW(Section):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    """torch.optim.AdamW."""

    learning_rate: PositiveNumber = 0.001
    """Step size at its highest; `train.schedule` says where it goes from there."""

    weight_decay: NotNegative = 0.01
    """Decay of the weights per step."""


class Schedule(Section):
    """What every schedule has."""

    warmup_samples: NonNegativeInt = 0
    """The learning rate rises in a straight line over the first so many samples."""


class Cosine(Schedule):
    """Down along half a cosine over the whole run."""

    name: Literal["cosine"]
    """Down along half a cosine."""

    final_share: Fraction = 0.0
    """Share of the learning rate that is left at the end."""


class Steps(Schedule):
    """Down by a factor every so many samples."""

    name: Literal["step"]
    """Down in steps."""

    every_samples: PositiveInt
    """Samples between two steps down."""

    factor: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.1
    """What the learning rate is multiplied with at each."""


class Constant(Schedule):
    """Always the same, after the warm-up."""

    name: Literal["constant"]
    """Always the same."""


class EarlyStopping(Section):
    """Stop when validation has not become better for some epochs."""

    metric: Metric = "val_loss"
    """What must become better: `val_loss` lower, `val_accuracy` higher."""

    patience_epochs: PositiveInt
    """Epochs without an improvement after which the run ends."""

    min_delta: NotNegative = 0.0
    """Changes up to this size are no improvement."""


class Fsdp2(Section):
    """How `strategy: fsdp2` shares a model out over workers."""

    reshard_after_forward: bool = True
    """Give gathered weights up between the forward and the backward pass: less memory, and one exchange
    more."""

    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers that weights are gathered and computed in; each worker keeps its share in fp32."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers that gradients are added up in."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in host memory, and each on the GPU only while it is needed."""


class DeepSpeed(Section):
    """How `strategy: deepspeed` shares a model out over workers (its ZeRO)."""

    stage: Literal[1, 2, 3] = 3
    """What each worker keeps a share of alone: 1 the optimiser, 2 gradients, too, 3 weights, too."""

    offload: Literal["none", "optimizer", "all"] = "none"
    """What is kept in host memory: nothing, the optimiser, or with stage 3 the weights, too."""

    @model_validator(mode="after")
    def _offloads_what_is_shared_out(self) -> DeepSpeed:
        if self.offload == "all" and self.stage != 3:
            raise PydanticCustomError(
                "strategy",
                f"offload = all needs stage 3, which shares weights out; with {self.stage} use optimizer",
            )
        return self


AnyOptimizer = Sgd | AdamW
"""The registry of optimizers: the models that `train.optimizer` can have."""

OPTIMIZERS: tuple[str, ...] = tuple(
    get_args(model.model_fields["name"].annotation)[0] for model in get_args(AnyOptimizer)
)
"""The values that `train.optimizer.name` can have."""

Optimizer = Annotated[
    AnyOptimizer,
    Field(
        discriminator="name",
        description="The optimizer and its settings: "
        + " or ".join(f"`{{name: {name}, ...}}`" for name in OPTIMIZERS)
        + ".",
    ),
]


class Train(Section):
    """What every recipe has that trains a network."""

    no_use_for: ClassVar[tuple[str, ...]] = ()
    """Keys of `data` that mean nothing to the recipe."""

    recipe: str
    """What is learnt."""

    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """How the model is spread over workers: `ddp` copies it to each, with `fsdp2` each keeps a share of its
    weights, gradients and optimiser, with `deepspeed` of as much of that as its stage says."""

    fsdp2: Fsdp2 | None = None
    """Settings of `strategy: fsdp2`."""

    deepspeed: DeepSpeed | None = None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShare:
    """What one worker computes of each global batch."""

    samples: int
    """Of one optimiser step."""
    micro_batch_size: int
    """Of one forward and backward pass."""

    @property
    def accumulation(self) -> int:
        """Passes per step."""
        return self.samples // self.micro_batch_size


def share_batch(train: Train, num_workers: int) -> BatchShare:
    """A global batch over workers and passes: 64 over 2 workers by 16 -> 32 samples in 2 passes.

    Raises ValueError with the nearest numbers that work, since a rounded batch would change what is
    learnt.
    """
    share, rest = divmod(train.global_batch_size, num_workers)
    if rest:
        nearest = [size * num_workers for size in (share, share + 1) if size > 0]
        raise ValueError(
            f"train.global_batch_size = {train.global_batch_size} cannot be shared equally by "
            f"{num_workers} workers: {rest} left over. Use {' or '.join(map(str, nearest))}, "
            f"or a number of workers that divides {train.global_batch_size}."
        )
    micro = train.micro_batch_size or share
    if share % micro:
        smaller = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        raise ValueError(
            f"train.micro_batch_size = {micro} does not divide the {share} samples that each of "
            f"{num_workers} workers has of train.global_batch_size = {train.global_batch_size}. "
            f"Use {smaller}, or another divisor of {share}."
        )
    return BatchShare(samples=share, micro_batch_size=micro)
