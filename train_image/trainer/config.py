"""What a run asks of the training program: the sections of a run file that the trainer reads.

The launcher checks them on the laptop, so that a typo fails there and not after the queue and the
image pull; hence this module needs pydantic and the standard library alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

CONFIG_VARIABLE = "TRAINYARD_CONFIG"
"""The environment variable that carries a run's config as JSON to the driver."""

CODE_VARIABLE = "TRAINYARD_CODE"
"""The one that carries the code of a run: a tar.gz in base64."""

RUN_NAME_LIMIT = 38
"""Longest run name: a RayJob's 47 characters less `-` and 8 of the hash."""

DATA_LABELS = {"trainyard.io/nodes": "data"}
"""Ray labels of the nodes that a run has for its Ray loader alone."""

WORKER_RESOURCE = "trainyard_worker"
"""Counts the places for workers on a Ray node, where its CPUs alone would say something else."""

DATA_CPUS = 1
"""Logical CPUs beside the workers: without one, Ray Data waits for ever for a place to read."""

RunName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z]([a-z0-9-]*[a-z0-9])?$", min_length=1, max_length=RUN_NAME_LIMIT
    ),
]
PositiveNumber = Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=False, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=False)]
Share = Annotated[float, Field(gt=0, le=1, strict=False)]
Metric = Literal["val_accuracy", "val_loss"]

MAY_CHANGE = {
    "data": {"decode_workers", "endpoint", "max_bad_samples", "ray_nodes"},
    "train": {"channels_last", "compile", "epochs", "micro_batch_size", "rounds"},
}
"""Keys of the sections that make a run's identity, but do not belong to it themselves. Those of LENGTHS may
only be raised. The number of workers belongs to it, too, where `has_fixed_workers`."""

LENGTHS = ("epochs", "rounds")
"""Keys of `train` that say how long a recipe trains; each recipe has one of them."""

BUILT_IN = {
    "breast_cancer": "gradient_boosting",
    "digits": "image_classification",
    "stdlib": "language_model",
}
"""Data sets that come with a package, and the recipe that learns each."""


class Section(BaseModel):
    """A part of a run file: closed, frozen, each field with a description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


def _require_source(source: str) -> str:
    """A built-in data set by its name, or a path: with a slash, so that a misspelled name is none."""
    if source in BUILT_IN or "/" in source:
        return source
    raise PydanticCustomError(
        "source",
        f"must be {', '.join(BUILT_IN)}, a path with a slash in it such as ./{source}, "
        "or s3://bucket/prefix",
    )


class Augment(Section):
    """How training images are changed at random, on the device; each epoch in another way."""

    flip: bool = False
    """Mirror an image from left to right, one time in two."""

    crop: NonNegativeInt = 0
    """Move an image by up to so many pixels up, down, left and right; black comes in."""


class Data(Section):
    """What to train on, and who feeds it."""

    source: Annotated[str, AfterValidator(_require_source)]
    """`digits` (1,797 handwritten digits that come with scikit-learn), `stdlib` (a mebibyte of Python's own
    modules, as text), or a path or `s3://` URL: of what `trainyard data prepare` made, idx files, a folder
    with a sub-folder per class, a CSV or JSONL manifest, or Parquet files; for `language_model` of a text
    file or a folder of text files."""

    text_files: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Which files of a folder are text, by their names, such as `*.md`; without it `*.txt`. Those in
    sub-folders count, too."""

    valid_source: Annotated[str, AfterValidator(_require_source)] | None = None
    """Validation images or text; without them, `valid_share` of the source."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """Share of each class, or of the end of each text file, that is kept for validation where the source
    has no part for it."""

    endpoint: str | None = None
    """Address of the sources' S3 server, if it is neither AWS nor the storage's own."""

    image_column: str = "image"
    """Column of the images: paths in a manifest, bytes or pixels in Parquet."""

    label_column: str = "label"
    """Column of the labels: numbers from 0, or names."""

    loader: Literal["torch", "ray"] = "torch"
    """Who makes the batches: a torch DataLoader in each worker, or Ray Data."""

    decode_workers: NonNegativeInt | None = None
    """Processes of each worker that decode images for the torch loader; without it as many as the worker has
    CPUs beside its first, and none where there is nothing to decode."""

    ray_nodes: dict[str, str] | None = None
    """Labels of the nodes on which the Ray loader reads and decodes, such as `{ray-subcluster: data}`;
    without them it may use any node."""

    shuffle: bool = True
    """Train on the samples in a new order each epoch, the same for the same seed."""

    augment: Augment = Augment()
    """Random changes of training images."""

    drop_last: bool = True
    """Leave out, in each epoch, what does not fill a global batch; else the last batch is smaller."""

    max_bad_samples: NonNegativeInt = 0
    """How many samples that cannot be read may be left out, in all."""


class Table(Section):
    """The rows that `gradient_boosting` learns from."""

    source: Annotated[str, AfterValidator(_require_source)]
    """`breast_cancer` (569 rows of 30 columns that come with scikit-learn; the label is `diagnosis`), or a
    path or `s3://` URL: of a Parquet file, or of a folder with Parquet files."""

    valid_source: Annotated[str, AfterValidator(_require_source)] | None = None
    """Rows for validation, with the same columns; without them, `valid_share` of the source."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """Share of the rows that is kept for validation, drawn with the run's seed."""

    endpoint: str | None = None
    """Address of the sources' S3 server, if it is neither AWS nor the storage's own."""

    label_column: str = "label"
    """What is learnt: numbers, or for classes names, too."""

    feature_columns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """What it is learnt from: columns of numbers; without it all but the label's."""


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


Optimizer = Annotated[Sgd | AdamW, Field(discriminator="name")]


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
    """How weights follow gradients: `{name: sgd, ...}` or `{name: adamw, ...}`."""

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
    """How weights follow gradients: `{name: sgd, ...}` or `{name: adamw, ...}`."""


Objective = Literal["binary", "multiclass", "regression"]


class Boosting(Section):
    """Trees are added one after the other, each to mend what those before it get wrong."""

    recipe: Literal["gradient_boosting"]
    """What is learnt: a column of a table, from its other columns."""

    library: Literal["xgboost", "lightgbm"]
    """Who grows the trees, spread over all workers."""

    objective: Objective
    """What the label is: one of two classes (log loss), one of several (log loss), or a number (squared
    error)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the rows kept for validation, and of all that is drawn at random."""

    rounds: PositiveInt
    """How often trees are added: one in each round, with `multiclass` one for each class."""

    learning_rate: PositiveNumber = 0.1
    """How much of what a tree says is taken over."""

    max_depth: Annotated[int, Field(ge=1, le=16)] = 6
    """Longest way from the root of a tree to a leaf."""

    max_leaves: Annotated[int, Field(ge=2, le=2**16)] | None = None
    """Most leaves of a tree, which then grows where that gains the most; without it as many as its depth
    allows."""

    min_child_weight: NotNegative = 1.0
    """Least sum of second derivatives in a leaf: with `regression`, of rows."""

    min_split_gain: NotNegative = 0.0
    """Least gain for which a leaf is split."""

    reg_alpha: NotNegative = 0.0
    """L1 penalty on what leaves say."""

    reg_lambda: NotNegative = 1.0
    """L2 penalty on what leaves say."""

    subsample: Share = 1.0
    """Share of the rows that each round sees, drawn at random."""

    colsample_bytree: Share = 1.0
    """Share of the columns that each tree sees, drawn at random."""

    max_bin: Annotated[int, Field(ge=2, le=2**16)] = 255
    """Most steps into which a column's values are put."""


def recipe_named(train: Any) -> str:
    """The recipe that a `train` section names, read or not; without a name that of images."""
    if isinstance(train, Train | Boosting):
        return train.recipe
    named = train.get("recipe") if isinstance(train, Mapping) else None
    return "image_classification" if named is None else str(named)


AnyTrain = Annotated[
    Annotated[ImageClassification, Tag("image_classification")]
    | Annotated[LanguageModel, Tag("language_model")],
    Discriminator(recipe_named),
]
"""A recipe that trains a network, and its settings."""

RECIPES = ("image_classification", "language_model", "gradient_boosting")
"""All that `train.recipe` may name."""

BOOSTING = RECIPES[-1]
"""The one without a network, whose runs have other sections."""


def require_fit(data: Data, train: Train) -> None:
    """Raises PydanticCustomError if `data` has what the recipe has no use for."""
    for key in train.no_use_for:
        if getattr(data, key) != Data.model_fields[key].get_default():
            raise PydanticCustomError(
                "one_of", f"data.{key} means nothing to train.recipe = {train.recipe}: remove it"
            )
    require_known(data, train.recipe)


def require_known(data: Data | Table, recipe: str) -> None:
    """Raises PydanticCustomError for a built-in data set that another recipe learns."""
    for key in ("source", "valid_source"):
        word = getattr(data, key)
        if BUILT_IN.get(word, recipe) != recipe:
            raise PydanticCustomError(
                "one_of",
                f"data.{key} = {word} is for train.recipe = {BUILT_IN[word]}, not for {recipe}: "
                "use another source, or another recipe",
            )


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


def require_boosting_fit(data: Table, train: Boosting, checkpoint: BoostingCheckpoint) -> None:
    """Raises PydanticCustomError for sections of `gradient_boosting` that contradict each other."""
    require_known(data, train.recipe)
    if train.objective == "regression" and checkpoint.best == "val_accuracy":
        raise PydanticCustomError(
            "one_of",
            "checkpoint.best = val_accuracy is of classes, and a regression has none: use val_loss",
        )
    if data.feature_columns is not None:
        columns = data.feature_columns
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice or data.label_column in columns:
            raise PydanticCustomError(
                "one_of",
                f"data.feature_columns has {', '.join(twice)} twice"
                if twice
                else f"data.feature_columns has {data.label_column}, which is data.label_column",
            )


class Checkpoint(Section):
    """When the run is saved, and what stays."""

    every_epochs: PositiveInt = 1
    """Save after each so many epochs, and at the end."""

    every_s: PositiveNumber | None = 300.0
    """Save within an epoch, too, when the last checkpoint is so many seconds old; null for never."""

    every_samples: PositiveInt | None = None
    """Save within an epoch, too, each time that about so many samples more have been trained."""

    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""

    keep_every_epochs: PositiveInt | None = None
    """Of each so many epochs one checkpoint stays for good."""

    best: Metric = "val_accuracy"
    """The best checkpoint by this always stays: `val_accuracy` the highest, `val_loss` the lowest."""

    deliver: Literal["last", "best"] = "last"
    """Whose weights become model.pt at the end."""


class BoostingCheckpoint(Section):
    """When a run of `gradient_boosting` is saved, and what stays."""

    # A round sees each row once: it is an epoch of one step to all that knows no rounds.
    every_samples: ClassVar[None] = None
    keep_every_epochs: ClassVar[None] = None

    every_rounds: PositiveInt = 10
    """Save after each so many rounds, and at the end."""

    every_s: PositiveNumber | None = 300.0
    """Save after a round, too, when the last checkpoint is so many seconds old; null for never."""

    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""

    best: Metric = "val_loss"
    """The best checkpoint by this always stays: `val_loss` the lowest, `val_accuracy` the highest."""

    deliver: Literal["last", "best"] = "last"
    """Which checkpoint becomes the run's model at the end."""

    @property
    def every_epochs(self) -> int:
        return self.every_rounds


PLACEHOLDERS = ("workers", "gpus", "storage", "run", "attempt")
"""What a command's arguments may name in braces."""

_BRACES = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def _require_placeholders(command: tuple[str, ...]) -> tuple[str, ...]:
    """A misspelled name in braces would reach the program as it is."""
    for argument in command:
        for _, name in _BRACES.findall(argument):
            if name and name not in PLACEHOLDERS:
                raise PydanticCustomError(
                    "placeholder",
                    f"{{{name}}} is none of "
                    f"{', '.join(f'{{{known}}}' for known in PLACEHOLDERS)}; "
                    f"write {{{{{name}}}}} for the text {{{name}}}",
                )
    return command


Command = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1, strict=False),
    AfterValidator(_require_placeholders),
]
"""A program and its arguments, without a shell."""


Function = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""`module:callable`."""


Launcher = Literal["torchrun"]


def fill_command(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """`--num-workers {workers}` -> `--num-workers 2`; `{{workers}}` -> `{workers}`."""

    def fill(found: re.Match[str]) -> str:
        return f"{{{found[1]}}}" if found[1] else values[found[2]]

    return [_BRACES.sub(fill, argument) for argument in command]


class Faults(Section):
    """How many failures a run survives."""

    worker_failures: NonNegativeInt = 3
    """Restarts of the worker group inside one attempt (Ray Train's `max_failures`)."""

    retries: NonNegativeInt = 2
    """New attempts on a new cluster after a failed one (RayJob's `backoffLimit`)."""

    collective_timeout_s: PositiveNumber = 900.0
    """How many seconds workers wait for each other, or for a sign of life of one, before they start over."""


class Scaling(Section):
    """The numbers of the plan that the trainer needs."""

    num_workers: PositiveInt
    """Ray Train workers; of an elastic run the most."""

    min_workers: PositiveInt | None = None
    """Of an elastic run the fewest."""

    workers_per_node: PositiveInt = 1
    """Workers that an elastic run wins or loses together."""

    use_gpu: bool
    """Give each worker one GPU."""

    cpus_per_worker: PositiveInt
    """Logical CPUs of one worker, and its threads."""

    has_worker_places: bool = False
    """Nodes count places for workers as a resource of their own, and each worker takes one."""

    @property
    def fewest(self) -> int:
        """Workers without which the run does not start."""
        return self.min_workers or self.num_workers

    @property
    def sizes(self) -> range:
        """All numbers of workers that the run may have."""
        return range(self.fewest, self.num_workers + 1, self.workers_per_node)


class Storage(Section):
    """Where the folders of runs lie."""

    path: str
    """A folder that all nodes share, or `s3://bucket/prefix`."""

    endpoint: str | None = None
    """Address of an S3 server that is not AWS, such as `http://minio.storage:9000`."""

    @property
    def uri(self) -> str:
        """As Ray and pyarrow take it: `s3://bucket/prefix?scheme=http&endpoint_override=host:9000`."""
        if self.endpoint is None:
            return self.path
        server = urlsplit(self.endpoint)
        return f"{self.path}?scheme={server.scheme}&endpoint_override={server.netloc}"

    def absolute(self) -> Storage:
        """The same from any working directory."""
        if "://" in self.path:
            return self
        return self.model_copy(update={"path": str(Path(self.path).resolve())})

    @classmethod
    def of_uri(cls, uri: str) -> Storage:
        """What `uri` gives, back again."""
        path, _, query = uri.partition("?")
        told = dict(parse_qsl(query))
        if "endpoint_override" not in told:
            return cls(path=path)
        return cls(path=path, endpoint=f"{told['scheme']}://{told['endpoint_override']}")


class AttemptConfig(Section):
    """What every attempt needs to know; travels as JSON in `TRAINYARD_CONFIG`."""

    name: RunName
    """The run: its identity, and its folder below the storage path."""

    faults: Faults = Faults()
    """How many failures it survives."""

    scaling: Scaling
    """The numbers of the plan."""

    storage: Storage
    """Where its folder lies."""


class TrainerConfig(AttemptConfig):
    """An attempt at a recipe that trains a network."""

    data: Data
    """What to train on."""

    train: AnyTrain
    """The recipe."""

    checkpoint: Checkpoint = Checkpoint()
    """When the run is saved."""

    @model_validator(mode="after")
    def _recipe_fits(self) -> TrainerConfig:
        require_fit(self.data, self.train)
        is_elastic = self.scaling.min_workers is not None
        require_one_size(self.train, "scaling.num_workers", is_elastic=is_elastic)
        return self


class BoostingConfig(AttemptConfig):
    """An attempt at `gradient_boosting`."""

    data: Table
    """What to train on."""

    train: Boosting
    """The trees."""

    checkpoint: BoostingCheckpoint = BoostingCheckpoint()
    """When the run is saved."""

    @model_validator(mode="after")
    def _sections_fit(self) -> BoostingConfig:
        require_boosting_fit(self.data, self.train, self.checkpoint)
        return self


class OwnConfig(AttemptConfig):
    """An attempt at code of one's own."""

    code_sha256: str | None = None
    """Of the archive in `TRAINYARD_CODE`, in which it runs; without it nothing travels."""


class CommandConfig(OwnConfig):
    """An attempt at a program of one's own."""

    command: Command
    """The program and its arguments."""

    launcher: Launcher | None = None
    """Who starts the workers; without it the program does."""


class FunctionConfig(OwnConfig):
    """An attempt at a training function of one's own."""

    function: Function
    """What each Ray Train worker calls."""

    train_loop_config: dict[str, Any] = Field(default_factory=dict)
    """What it is called with."""

    datasets: dict[str, str] = Field(default_factory=dict)
    """Parquet files that Ray Data gives to it, by name."""


RecipeConfig = TrainerConfig | BoostingConfig
"""An attempt at a built-in recipe."""

AnyConfig = TrainerConfig | BoostingConfig | CommandConfig | FunctionConfig

KINDS: Mapping[str, type[AnyConfig]] = {
    "train": TrainerConfig,
    BOOSTING: BoostingConfig,
    "command": CommandConfig,
    "function": FunctionConfig,
}
"""Of an attempt, by what `kinds_of` says."""


def kinds_of(document: Mapping[str, Any]) -> list[str]:
    """What a run file or a config says is run: the keys among `train`, `command` and `function`, of which
    there should be one; `train` of another shape by its recipe."""
    kinds = [key for key in ("train", "command", "function") if key in document]
    is_boosting = recipe_named(document.get("train")) == BOOSTING
    return [BOOSTING if kind == "train" and is_boosting else kind for kind in kinds]


def read_config(
    environment: Mapping[str, str] = os.environ,
) -> AnyConfig:
    """The config of this attempt, from `TRAINYARD_CONFIG`. Raises KeyError or pydantic's ValidationError."""
    text = environment[CONFIG_VARIABLE]
    try:
        document = from_json(text)
    except ValueError:
        document = None  # the model says what is wrong with it
    kinds = kinds_of(document) if isinstance(document, dict) else []
    return KINDS[(kinds or ["train"])[0]].model_validate_json(text)


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
