"""The section `train` of the recipe `gradient_boosting`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.checkpoint import BoostingCheckpoint
from trainyard_trainer.config.data.section import Table, require_known
from trainyard_trainer.config.section import NotNegative, PositiveNumber, Section, Share
from trainyard_trainer.config.training.metric import ACCURACY, RMSE, Metric
from trainyard_trainer.config.training.train import require_metric

Objective = Literal["binary", "multiclass", "regression"]

OBJECTIVE_METRICS: Mapping[str, tuple[Metric, ...]] = {
    "binary": (ACCURACY,),
    "multiclass": (ACCURACY,),
    "regression": (RMSE,),
}
"""The metrics beside the loss, by `train.objective`."""


class Boosting(Section):
    """Gradient boosting: each round adds decision trees that reduce the loss of the trees before them."""

    recipe: Literal["gradient_boosting"]
    """The recipe: predict one column of a table from its other columns."""

    library: Literal["xgboost", "lightgbm"]
    """The library that trains the trees, distributed over all workers."""

    objective: Objective
    """The kind of label and the loss: one of two classes (log loss), one of several classes (log loss), or a
    number (squared error)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of all random numbers: validation rows, row sampling and column sampling."""

    rounds: PositiveInt
    """The number of boosting rounds. Each adds one tree, or with `multiclass` one tree per class."""

    learning_rate: PositiveNumber = 0.1
    """The factor by which the output of each new tree is scaled (shrinkage)."""

    max_depth: Annotated[int, Field(ge=1, le=16)] = 6
    """The largest depth of a tree."""

    max_leaves: Annotated[int, Field(ge=2, le=2**16)] | None = None
    """The largest number of leaves of a tree, which then grows leaf by leaf where the loss falls the most.
    Without it, only the depth limits a tree."""

    min_child_weight: NotNegative = 1.0
    """The smallest sum of second derivatives of the loss in a leaf; with `regression`, the number of rows."""

    min_split_gain: NotNegative = 0.0
    """The smallest reduction of the loss for which a leaf is split."""

    reg_alpha: NotNegative = 0.0
    """The L1 regularisation of the leaf values."""

    reg_lambda: NotNegative = 1.0
    """The L2 regularisation of the leaf values."""

    subsample: Share = 1.0
    """The share of the rows that is drawn at random for each round."""

    colsample_bytree: Share = 1.0
    """The share of the columns that is drawn at random for each tree."""

    max_bin: Annotated[int, Field(ge=2, le=2**16)] = 255
    """The largest number of histogram bins per column."""


def require_boosting_fit(data: Table, train: Boosting, checkpoint: BoostingCheckpoint) -> None:
    """Raise PydanticCustomError for sections of `gradient_boosting` that contradict each other."""
    require_known(data, train.recipe)
    require_metric("checkpoint.best", checkpoint.best, OBJECTIVE_METRICS[train.objective])
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
