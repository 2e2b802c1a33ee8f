"""XGBoost and LightGBM behind one small interface: rounds of boosting, from a model on.

Both are told what is drawn at random by the number of the round alone, not by what was drawn before it. So
what they go on with becomes the model that it would have become.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from trainyard_trainer.boosting.table import PreparedTable, Rows
from trainyard_trainer.config.boosting import Boosting
from trainyard_trainer.parallel.strategy import Worker

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """How good a model is over the rows of all workers."""

    loss: float
    """Mean log loss, or mean squared error."""
    accuracy: float | None
    """None of a regression."""
    val_loss: float
    val_accuracy: float | None


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
    """Says how LightGBM's workers find each other."""


EachRound = Callable[[Figures, Callable[[], bytes]], bool]
"""Hears of each round's figures, may ask for the model, and says whether to go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Importance:
    """What a column is to a model."""

    column: str
    gain: float
    """Sum over all splits by it."""
    splits: int


class Library(Protocol):
    """What the recipe needs of a boosting library: XGBoost or LightGBM."""

    file: str
    """A model's, in the library's own format."""
    package: str
    """Its distribution."""

    def boost(
        self, task: BoostingInput, model: bytes | None, begin: int, each_round: EachRound
    ) -> None:
        """Add the rounds from `begin` on to a model, which has so many. All workers call it alike."""

    def importance(self, model: bytes, table: Mapping[str, Any]) -> list[Importance]:
        """Of each column, in the order of `columns`; `table` is what `PreparedTable.to_json` says."""


class XGBoost:
    """With histograms. What workers tell each other goes over the group that Ray Train has made."""

    file = "model.ubj"
    package = "xgboost-cpu"

    OBJECTIVES: ClassVar = {
        "binary": ("binary:logistic", "logloss", "error"),
        "multiclass": ("multi:softprob", "mlogloss", "merror"),
        "regression": ("reg:squarederror", "rmse", None),
    }
    """And the names of loss and error."""

    def boost(
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
                # Its draws go on from round to round, unless the tool that grows trees is made anew.
                booster.set_param("tree_method", "approx")
                booster.save_config()
                booster.set_param("tree_method", "hist")
            booster.update(rows, iteration=number)
            told = self._told(booster.eval_set([(rows, "train"), (valid, "valid")], number))
            figures = self._figures(task, told)
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

    def _told(self, line: str) -> dict[str, float]:
        r"""`[3]\ttrain-logloss:0.5\tvalid-logloss:0.6` in parts; it is over all workers."""
        pairs = (word.rpartition(":") for word in line.split("\t")[1:])
        return {name: float(value) for name, _, value in pairs}

    def _figures(self, task: BoostingInput, told: Mapping[str, float]) -> Figures:
        _, loss, error = self.OBJECTIVES[task.train.objective]
        if error is None:
            return Figures(
                loss=told[f"train-{loss}"] ** 2,
                accuracy=None,
                val_loss=told[f"valid-{loss}"] ** 2,
                val_accuracy=None,
            )
        return Figures(
            loss=told[f"train-{loss}"],
            accuracy=1 - told[f"train-{error}"],
            val_loss=told[f"valid-{loss}"],
            val_accuracy=1 - told[f"valid-{error}"],
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
    """Over its own network (`tree_learner: data`); Ray Train tells where its workers listen."""

    file = "model.txt"
    package = "lightgbm"

    OBJECTIVES: ClassVar = {
        "binary": ("binary", "binary_logloss", "binary_error"),
        "multiclass": ("multiclass", "multi_logloss", "multi_error"),
        "regression": ("regression", "l2", None),
    }
    """And the names of loss and error."""

    def boost(
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

        def draw(env: Any) -> None:
            # Draws go on from round to round. What draws rows heeds another seed only together with another
            # number of rounds between draws. (Drawing must not be switched off in between: LightGBM 4.7 then
            # compares with settings that it has freed, and may leave it off.)
            # Its own count of rounds leaves out those in which no tree could be grown.
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

        def tell(env: Any) -> None:
            figures = self._figures(task, env.evaluation_result_list)
            saved = lambda: env.model.model_to_string(num_iteration=-1).encode()  # noqa: E731
            if not each_round(figures, saved):
                raise lightgbm.callback.EarlyStopException(env.iteration, [])

        draw.before_iteration = True  # type: ignore[attr-defined]
        is_random = train.subsample < 1 or train.colsample_bytree < 1
        lightgbm.train(
            settings,
            rows,
            train.rounds - begin,
            valid_sets=[rows, valid],
            valid_names=["train", "valid"],
            init_model=lightgbm.Booster(model_str=model.decode()) if model else None,
            keep_training_booster=True,
            callbacks=[draw, tell] if is_random else [tell],
        ).free_network()

    def _settings(self, task: BoostingInput) -> Settings:
        train = task.train
        objective, *metrics = self.OBJECTIVES[train.objective]
        settings: Settings = {
            "objective": objective,
            "metric": [metric for metric in metrics if metric],
            "seed": train.seed,
            # The same for the same data, however many threads there are.
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": task.threads,
            "verbosity": -1,
            "learning_rate": train.learning_rate,
            "max_depth": train.max_depth,
            "num_leaves": train.max_leaves or 2**train.max_depth,
            "min_sum_hessian_in_leaf": train.min_child_weight,
            "min_data_in_leaf": 1,
            # It looks at a worker's own rows alone, of which others may have more values.
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

    def _figures(self, task: BoostingInput, told: list[Any]) -> Figures:
        """What LightGBM tells is of this worker's rows alone: means, which are weighed here."""
        _, loss, error = self.OBJECTIVES[task.train.objective]
        counts = {"train": len(task.rows.labels), "valid": len(task.valid.labels)}
        own = {(each[0], each[1]): each[2] * counts[each[0]] for each in told}
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
"""By `train.library`."""
