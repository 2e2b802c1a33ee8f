"""What a run asks of the training program: the sections of a run file that the trainer reads.

The launcher checks them on the laptop, so that a typo fails there and not after the queue and the
image pull; hence this module needs pydantic and the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
)

CONFIG_VARIABLE = "TRAINYARD_CONFIG"
"""The environment variable that carries a `TrainerConfig` as JSON to the driver."""

RUN_NAME_LIMIT = 38
"""Longest run name: a RayJob's 47 characters less `-` and 8 of the hash."""

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


class Section(BaseModel):
    """A part of a run file: closed, frozen, each field with a description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class Data(Section):
    """What to train on, and who feeds it."""

    source: Literal["digits"]
    """The data set: `digits`, the 1,797 handwritten digits that come with scikit-learn."""

    loader: Literal["torch", "ray"] = "torch"
    """Who makes the batches: a torch DataLoader in each worker, or Ray Data."""

    shuffle: bool = True
    """Train on the samples in a new order each epoch, the same for the same seed."""


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


class Sgd(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    """torch.optim.SGD."""

    learning_rate: PositiveNumber = 0.02
    """Step size at the start; it falls to zero along a cosine over the run."""

    momentum: Fraction = 0.9
    """How much of the last step goes on."""

    weight_decay: NotNegative = 0.0005
    """Decay of the weights per step."""


class AdamW(Section):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    """torch.optim.AdamW."""

    learning_rate: PositiveNumber = 0.001
    """Step size at the start; it falls to zero along a cosine over the run."""

    weight_decay: NotNegative = 0.01
    """Decay of the weights per step."""


class Train(Section):
    """One built-in recipe and its settings."""

    recipe: Literal["image_classification"] = "image_classification"
    """What is learnt."""

    strategy: Literal["ddp"] = "ddp"
    """How the model is spread over workers: `ddp` copies it to each."""

    model: Model
    """The network."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of initial weights and sample order."""

    epochs: PositiveInt
    """How often each sample is seen."""

    global_batch_size: PositiveInt
    """Samples per optimiser step over all workers together; it must be a multiple of their number."""

    optimizer: Sgd | AdamW = Field(default=Sgd(name="sgd"), discriminator="name")
    """How weights follow gradients: `{name: sgd, ...}` or `{name: adamw, ...}`."""


class Checkpoint(Section):
    """When the run is saved."""

    every_epochs: PositiveInt = 1
    """Save after each so many epochs, and at the end."""

    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""


class Faults(Section):
    """How many failures a run survives."""

    worker_failures: NonNegativeInt = 3
    """Restarts of the worker group inside one attempt (Ray Train's `max_failures`)."""

    retries: NonNegativeInt = 2
    """New attempts on a new cluster after a failed one (RayJob's `backoffLimit`)."""


class Scaling(Section):
    """The numbers of the plan that the trainer needs."""

    num_workers: PositiveInt
    """Ray Train workers."""

    use_gpu: bool
    """Give each worker one GPU."""

    cpus_per_worker: PositiveInt
    """Logical CPUs of one worker, and its threads."""


class Storage(Section):
    """Where the folders of runs lie."""

    path: str
    """A folder that all nodes share, or `s3://bucket/prefix`."""

    endpoint: str | None = None
    """Address of an S3 server that is not AWS, such as `http://minio.storage:9000`."""


class TrainerConfig(Section):
    """All that one attempt needs to know; travels as JSON in `TRAINYARD_CONFIG`."""

    name: RunName
    """The run: its identity, and its folder below the storage path."""

    data: Data
    """What to train on."""

    train: Train
    """The recipe."""

    checkpoint: Checkpoint = Checkpoint()
    """When the run is saved."""

    faults: Faults = Faults()
    """How many failures it survives."""

    scaling: Scaling
    """The numbers of the plan."""

    storage: Storage
    """Where its folder lies."""


def read_config(environment: Mapping[str, str] = os.environ) -> TrainerConfig:
    """The config of this attempt, from `TRAINYARD_CONFIG`. Raises KeyError or pydantic's ValidationError."""
    return TrainerConfig.model_validate_json(environment[CONFIG_VARIABLE])


def batch_per_worker(global_batch_size: int, num_workers: int) -> int:
    """Samples of one worker per step: 64 over 2 workers -> 32.

    Raises ValueError with the nearest sizes that can be shared out, since a rounded batch would
    change what is learnt.
    """
    share, rest = divmod(global_batch_size, num_workers)
    if rest == 0:
        return share
    nearest = [size * num_workers for size in (share, share + 1) if size > 0]
    raise ValueError(
        f"train.global_batch_size = {global_batch_size} cannot be shared equally by "
        f"{num_workers} workers: {rest} left over. Use {' or '.join(map(str, nearest))}, "
        f"or a number of workers that divides {global_batch_size}."
    )
