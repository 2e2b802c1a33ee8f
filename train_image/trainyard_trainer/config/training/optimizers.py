"""`train.optimizer` and `train.schedule`: how gradients change the weights, and the learning rate over
time."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from trainyard_trainer.config.section import Fraction, NotNegative, PositiveNumber, Section


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
    """The settings that all learning-rate schedules have."""

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
