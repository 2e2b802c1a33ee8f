"""A common interface of XGBoost and LightGBM: train rounds of boosting, from scratch or from a saved model.

The random numbers of a round follow from the seed and the number of the round only, not from earlier draws. A
run that resumes from a checkpoint therefore ends with the same model as an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from trainyard_trainer.boosting.library_errors import explained_errors
from trainyard_trainer.boosting.table import PreparedTable, Rows
from trainyard_trainer.config.training.boosting import Boosting
from trainyard_trainer.parallel.worker import Worker

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Loss and accuracy of a model on the training and validation rows of all workers."""

    loss: float
    """The mean log loss; for a regression, the mean squared error."""
    accuracy: float | None
    """The share of correct predictions; None for a regression."""
    val_loss: float
    val_accuracy: float | None

    def metrics(self) -> dict[str, float]:
        """Return loss and metrics by the names of metrics.jsonl; of a regression the RMSE."""
        if self.accuracy is None or self.val_accuracy is None:
            own = {"rmse": math.sqrt(self.loss), "val_rmse": math.sqrt(self.val_loss)}
        else:
            own = {"accuracy": self.accuracy, "val_accuracy": self.val_accuracy}
        return {"loss": self.loss, "val_loss": self.val_loss, **own}


@dataclass(frozen=True, kw_only=True, slots=True)
class BoostingInput:
    """The input of a boosting library on one worker."""

    train: Boosting
    table: PreparedTable
    rows: Rows
    valid: Rows
    worker: Worker
    threads: int
    network: Callable[[], Settings]
    """A function that returns LightGBM's network parameters: the workers' addresses and the local port."""


EachRound = Callable[[Figures, Callable[[], bytes]], bool]
"""A callback after each round that returns whether training continues. Its arguments are the metrics of the
round and a function that serialises the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Importance:
    """The importance of a feature column in a model."""

    column: str
    gain: float
    """The sum of the gains of all splits on the column."""
    splits: int


class Library(Protocol):
    """The interface of a boosting library."""

    file: str
    """The name of the model's file, which has the library's own format."""
    package: str
    """The name of the library's distribution on PyPI."""

    def boost(
        self, task: BoostingInput, model: bytes | None, begin: int, each_round: EachRound
    ) -> None:
        """Train the rounds from `begin` on, on top of a model with `begin` rounds.

        All workers call this method with the same `begin`.
        """

    def importance(self, model: bytes, table: Mapping[str, Any]) -> list[Importance]:
        """Return the importance of each feature column, in the order of `table["columns"]`.

        `table` is the result of `PreparedTable.to_json`.
        """


class XGBoost:
    """XGBoost with `tree_method: hist`. Its workers communicate through a group that Ray Train creates."""

    file = "model.ubj"
    package = "xgboost-cpu"

    OBJECTIVES: ClassVar = {
        "binary": ("binary:logistic", "logloss", "error"),
        "multiclass": ("multi:softprob", "mlogloss", "merror"),
        "regression": ("reg:squarederror", "rmse", None),
    }
    """The objective, the metric of the loss and the metric of the error, by `train.objective`."""

    def boost(
        self, task: BoostingInput, model: bytes | None, begin: int, each_round: EachRound
    ) -> None:
        import xgboost

        with explained_errors("XGBoost", xgboost.core.XGBoostError):
            self._boost(task, model, begin, each_round)

    def _boost(
        self, task: BoostingInput, model: bytes | None, begin: int, each_round: EachRound
    ) -> None:
        import xgboost

        train, names = task.train, list(task.table.feature_names)
        rows, valid = (
            xgboost.DMatrix(part.features, part.labels, feature_names=names, nthread=task.threads)
            for part in (task.rows, task.valid)
        )
        booster = xgboost.Booster(
            self._settings(task), [rows, valid], bytearray(model) if model else None
        )
        is_random = train.subsample < 1 or train.colsample_bytree < 1
        for number in range(begin, train.rounds):
            if is_random:
                # XGBoost continues its sequence of random numbers across rounds. A new tree updater starts
                # from the seed of the round; changing the tree method back and forth creates one.
                booster.set_param("tree_method", "approx")
                booster.save_config()
                booster.set_param("tree_method", "hist")
            booster.update(rows, iteration=number)
            values = self._parse_evaluation(
                booster.eval_set([(rows, "train"), (valid, "valid")], number)
            )
            figures = self._figures(task, values)
            if not each_round(figures, lambda: bytes(booster.save_raw("ubj"))):
                return

    def _settings(self, task: BoostingInput) -> Settings:
        train = task.train
        objective, *metrics = self.OBJECTIVES[train.objective]
        settings: Settings = {
            "objective": objective,
            "eval_metric": [metric for metric in metrics if metric],
            "tree_method": "hist",
            "seed": train.seed,
            "seed_per_iteration": True,
            "nthread": task.threads,
            "learning_rate": train.learning_rate,
            "max_depth": train.max_depth,
            "min_child_weight": train.min_child_weight,
            "gamma": train.min_split_gain,
            "reg_alpha": train.reg_alpha,
            "reg_lambda": train.reg_lambda,
            "subsample": train.subsample,
            "colsample_bytree": train.colsample_bytree,
            "max_bin": train.max_bin,
        }
        if train.objective == "multiclass":
            settings["num_class"] = len(task.table.classes)
        if train.max_leaves:
            settings |= {"max_leaves": train.max_leaves, "grow_policy": "lossguide"}
        return settings

    def _parse_evaluation(self, line: str) -> dict[str, float]:
        r"""Parse a line of metrics over the rows of all workers: `[3]\ttrain-rmse:0.5\tvalid-rmse:0.6`."""
        pairs = (word.rpartition(":") for word in line.split("\t")[1:])
        return {name: float(value) for name, _, value in pairs}

    def _figures(self, task: BoostingInput, values: Mapping[str, float]) -> Figures:
        _, loss, error = self.OBJECTIVES[task.train.objective]
        if error is None:
            return Figures(
                loss=values[f"train-{loss}"] ** 2,
                accuracy=None,
                val_loss=values[f"valid-{loss}"] ** 2,
                val_accuracy=None,
            )
        return Figures(
            loss=values[f"train-{loss}"],
            accuracy=1 - values[f"train-{error}"],
            val_loss=values[f"valid-{loss}"],
            val_accuracy=1 - values[f"valid-{error}"],
        )

    def importance(self, model: bytes, table: Mapping[str, Any]) -> list[Importance]:
        import xgboost

        booster = xgboost.Booster(model_file=bytearray(model))
        gains: dict[str, Any] = booster.get_score(importance_type="total_gain")
        splits: dict[str, Any] = booster.get_score(importance_type="weight")
        return [
            Importance(
                column=column, gain=float(gains.get(name, 0.0)), splits=int(splits.get(name, 0))
            )
            for column, name in zip(table["columns"], table["feature_names"], strict=True)
        ]


class LightGBM:
    """LightGBM with `tree_learner: data`. Its workers connect to the addresses that Ray Train provides."""

    file = "model.txt"
    package = "lightgbm"

    OBJECTIVES: ClassVar = {
        "binary": ("binary", "binary_logloss", "binary_error"),
        "multiclass": ("multiclass", "multi_logloss", "multi_error"),
        "regression": ("regression", "l2", None),
    }
    """The objective, the metric of the loss and the metric of the error, by `train.objective`."""

    def boost(
        self, task: BoostingInput, model: bytes | None, begin: int, each_round: EachRound
    ) -> None:
        import lightgbm

        with explained_errors("LightGBM", lightgbm.basic.LightGBMError):
            self._boost(task, model, begin, each_round)

    def _boost(
        self, task: BoostingInput, model: bytes | None, begin: int, each_round: EachRound
    ) -> None:
        import lightgbm

        train, settings = task.train, self._settings(task)
        rows = lightgbm.Dataset(
            task.rows.features,
            task.rows.labels,
            feature_name=list(task.table.feature_names),
            free_raw_data=False,
            params=settings,
        )
        valid = rows.create_valid(task.valid.features, task.valid.labels, params=settings)

        def set_seed(env: Any) -> None:
            # LightGBM continues its sequence of random numbers across rounds: each round sets its own seed.
            # A new bagging_seed takes effect only if bagging_freq changes too. (bagging_freq must not be 0 in
            # between: LightGBM 4.7 then compares with freed settings, and bagging may stay off.)
            # LightGBM's own count of rounds omits rounds in which no tree could be grown.
            number = begin + env.iteration - env.begin_iteration
            seed = (train.seed * 1_000_003 + number) % 2**31
            if train.subsample < 1:
                env.model.reset_parameter({"bagging_freq": 2})
            env.model.reset_parameter(
                {
                    "bagging_freq": settings["bagging_freq"],
                    "bagging_seed": seed,
                    "feature_fraction_seed": seed,
                }
            )

        def call_back(env: Any) -> None:
            figures = self._figures(task, env.evaluation_result_list)
            saved = lambda: env.model.model_to_string(num_iteration=-1).encode()  # noqa: E731
            if not each_round(figures, saved):
                raise lightgbm.callback.EarlyStopException(env.iteration, [])

        set_seed.before_iteration = True  # type: ignore[attr-defined]
        is_random = train.subsample < 1 or train.colsample_bytree < 1
        lightgbm.train(
            settings,
            rows,
            train.rounds - begin,
            valid_sets=[rows, valid],
            valid_names=["train", "valid"],
            init_model=lightgbm.Booster(model_str=model.decode()) if model else None,
            keep_training_booster=True,
            callbacks=[set_seed, call_back] if is_random else [call_back],
        ).free_network()

    def _settings(self, task: BoostingInput) -> Settings:
        train = task.train
        objective, *metrics = self.OBJECTIVES[train.objective]
        settings: Settings = {
            "objective": objective,
            "metric": [metric for metric in metrics if metric],
            "seed": train.seed,
            # The same result for any number of threads.
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": task.threads,
            "verbosity": -1,
            "learning_rate": train.learning_rate,
            "max_depth": train.max_depth,
            "num_leaves": train.max_leaves or 2**train.max_depth,
            "min_sum_hessian_in_leaf": train.min_child_weight,
            "min_data_in_leaf": 1,
            # The filter looks only at the rows of one worker; on other workers the column may be useful.
            "feature_pre_filter": False,
            "min_gain_to_split": train.min_split_gain,
            "lambda_l1": train.reg_alpha,
            "lambda_l2": train.reg_lambda,
            "bagging_fraction": train.subsample,
            "bagging_freq": 1 if train.subsample < 1 else 0,
            "feature_fraction": train.colsample_bytree,
            "max_bin": train.max_bin,
        }
        if train.objective == "multiclass":
            settings["num_class"] = len(task.table.classes)
        if task.worker.world_size > 1:
            settings |= {"tree_learner": "data", "pre_partition": True, **task.network()}
        return settings

    def _figures(self, task: BoostingInput, values: list[Any]) -> Figures:
        """Return the metrics over all workers. LightGBM itself reports means over the rows of one worker."""
        _, loss, error = self.OBJECTIVES[task.train.objective]
        counts = {"train": len(task.rows.labels), "valid": len(task.valid.labels)}
        own = {(each[0], each[1]): each[2] * counts[each[0]] for each in values}
        names = [(part, metric) for part in counts for metric in (loss, error) if metric]
        sums = torch.tensor(
            [*counts.values(), *(own[name] for name in names)],
            dtype=torch.float64,
            device=task.worker.device,
        )
        rows, valid, *totals = task.worker.sum(sums).tolist()
        weights = {"train": rows, "valid": valid}
        means = {name: total / weights[name[0]] for name, total in zip(names, totals, strict=True)}
        return Figures(
            loss=means["train", loss],
            accuracy=1 - means["train", error] if error else None,
            val_loss=means["valid", loss],
            val_accuracy=1 - means["valid", error] if error else None,
        )

    def importance(self, model: bytes, table: Mapping[str, Any]) -> list[Importance]:
        import lightgbm

        booster = lightgbm.Booster(model_str=model.decode())
        gains: np.ndarray = booster.feature_importance("gain")
        splits: np.ndarray = booster.feature_importance("split")
        return [
            Importance(column=column, gain=float(gain), splits=int(count))
            for column, gain, count in zip(table["columns"], gains, splits, strict=True)
        ]


LIBRARIES: Mapping[str, Library] = {"xgboost": XGBoost(), "lightgbm": LightGBM()}
"""The libraries, by `train.library`."""
