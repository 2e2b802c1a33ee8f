"""`train` of the recipe gradient_boosting."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.checkpoint import BoostingCheckpoint
from trainyard_trainer.config.data import Table, require_known
from trainyard_trainer.config.section import NotNegative, PositiveNumber, Section, Share

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
