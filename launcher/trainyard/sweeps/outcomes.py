"""The outcomes and metrics of the runs of a sweep, and the choice of the best run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainyard.errors import ConfigError
from trainyard.run_file.models import BoostingRun, RecipeRun, RunConfig
from trainyard.submission.status import Phase
from trainyard.sweeps.combinations import Combination
from trainyard_trainer.config.trainer_config import AttemptConfig
from trainyard_trainer.config.training.boosting import Boosting
from trainyard_trainer.config.training.identity import LENGTHS, identity_of
from trainyard_trainer.config.training.metric import (
    LOSS,
    VALIDATION_PREFIX,
    Direction,
    goals_of,
    is_validation,
)
from trainyard_trainer.config.training.recipes import metrics_of
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.driver_output import record_of

Object = dict[str, Any]

DEFAULT_METRIC = f"{VALIDATION_PREFIX}{LOSS}"
"""The metric of a sweep without a built-in recipe, unless `--metric` names another one. Every recipe of a
user reports it."""

BEST_PREFIX = "best_"
"""`best_val_<name>` is the value of `val_<name>` at the best checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The metric that decides which run is best, and its direction."""

    metric: str
    is_lowest: bool

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value of the metric is better than another one."""
        return value < than if self.is_lowest else value > than


def goal_of(text: str | None, runs: Sequence[RunConfig] = ()) -> Goal:
    """Parse `--metric`: `accuracy` is maximised, metrics that end in loss and `-error` are minimised.

    None stands for the first metric of a built-in recipe, and for the validation's loss without one. A
    metric of a recipe has its own direction. Raises ConfigError if a built-in recipe among the runs does not
    report the metric.
    """
    recipes = [reported_by(run.train) for run in runs if isinstance(run, RecipeRun | BoostingRun)]
    if text is None:
        text = next(iter(recipes[0])) if recipes else DEFAULT_METRIC
    metric = text.removeprefix("-")
    if not metric:
        raise ConfigError("--metric is empty: set it to the name of a metric")
    for reported in recipes:
        if metric not in reported:
            raise ConfigError(
                f"--metric {metric}: a built-in recipe does not report this metric",
                f"It reports: {', '.join(reported)}.",
            )
    lowest = {name for each in recipes for name, direction in each.items() if direction == "lower"}
    is_lowest = text != metric or metric.endswith(LOSS) or metric in lowest
    return Goal(metric=metric, is_lowest=is_lowest)


def reported_by(train: Train | Boosting) -> dict[str, Direction]:
    """Return the metrics in the summary.json of a recipe, with their directions; the main one first."""
    goals = goals_of(metrics_of(train)).values()
    return {
        **{goal.name: goal.direction for goal in goals},
        **{f"{BEST_PREFIX}{goal.name}": goal.direction for goal in goals},
        **{goal.name.removeprefix(VALIDATION_PREFIX): goal.direction for goal in goals},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOutcome:
    """The outcome of a run of a sweep, with the records that were read so far."""

    phase: Phase
    message: str = ""
    summary: Object | None = None
    progress: Object | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric that is a finite number."""
        found: dict[str, float] = {}
        for record in (self.progress or {}, self.summary or {}):
            found |= _numbers(record)
        return found

    @property
    def is_incomplete(self) -> bool:
        """Whether the metrics are in a record of the run's folder that was not read yet."""
        return self.phase == "succeeded" and self.summary is None


def _numbers(record: Object) -> dict[str, float]:
    """Return the metrics of a record. User code has a mapping `metrics`; recipes have top-level keys."""
    metrics = record.get("metrics")
    if not isinstance(metrics, dict):
        metrics = {name: value for name, value in record.items() if _is_metric(name, record)}
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _is_metric(name: str, record: Object) -> bool:
    """Whether a key of a recipe's record is the loss, or a metric of training or validation."""
    is_trained = name == LOSS or f"{VALIDATION_PREFIX}{name}" in record
    return is_trained or is_validation(name.removeprefix(BEST_PREFIX))


class FileReader(Protocol):
    """The methods of a run's folder that are needed here."""

    def read(self, file: str) -> str | None: ...


def completed(outcome: SweepOutcome, folder: FileReader) -> SweepOutcome:
    """Return the outcome with the missing records from the run's folder."""
    return replace(
        outcome,
        summary=outcome.summary or _record(folder, names.SUMMARY),
        progress=outcome.progress or _record(folder, names.PROGRESS),
    )


def _record(folder: FileReader, file: str) -> Object | None:
    return record_of(folder.read(file) or "", "")


def has_trained(folder: FileReader, config: Object) -> bool:
    """Return whether the run has succeeded already with a config that trains the same model."""
    summary = _record(folder, names.SUMMARY)
    if summary is None or summary["outcome"] != "succeeded":
        return False
    kept = _record(folder, names.RUN)
    return kept is not None and _training_keys(kept) == _training_keys(config)


def _training_keys(config: Object) -> Object:
    """Return the keys that determine the result: identity and length of a recipe, all keys of user code."""
    if "train" not in config:
        others = {*AttemptConfig.model_fields, names.RECORD}
        return {key: config[key] for key in config.keys() - others}
    return identity_of(config) | {key: config["train"].get(key) for key in LENGTHS}


def rows_of(
    combinations: Sequence[Combination], outcomes: Mapping[str, SweepOutcome], goal: Goal
) -> list[Object]:
    """Return a row for each run in the order of the combinations. The best successful run is marked."""
    ordered = {combination.name: outcomes[combination.name] for combination in combinations}
    best = best_of(ordered, goal)
    return [
        {
            "run": combination.name,
            "settings": dict(combination.settings),
            "phase": outcome.phase,
            **_counts(outcome),
            "metrics": outcome.metrics,
            "best": combination.name == best,
            "message": outcome.message,
        }
        for combination, outcome in zip(combinations, ordered.values(), strict=True)
    ]


def best_of(outcomes: Mapping[str, SweepOutcome], goal: Goal) -> str | None:
    """Return the first run with the best value of the metric; None if no successful run has reported one."""
    best, name = math.nan, None
    for run, outcome in outcomes.items():
        value = outcome.metrics.get(goal.metric)
        if value is None or outcome.phase != "succeeded":
            continue
        if name is None or goal.is_better(value, best):
            best, name = value, run
    return name


def _counts(outcome: SweepOutcome) -> Object:
    summary, progress = outcome.summary or {}, outcome.progress or {}
    return {
        "epochs": summary.get("epochs"),
        "steps": summary.get("steps", progress.get("step")),
        "samples_per_s": summary.get("samples_per_s", progress.get("samples_per_s")),
    }


def table_of_rows(rows: Sequence[Object], goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Return the headings and cells of a table. The goal's metric comes first, empty columns are omitted."""
    reported = dict.fromkeys(name for row in rows for name in row["metrics"])
    others = [name for name in reported if name != goal.metric]
    keys = list(rows[0]["settings"])
    columns = [
        ("run", [row["run"] for row in rows]),
        *((key, [row["settings"][key] for row in rows]) for key in keys),
        ("phase", [row["phase"] for row in rows]),
        ("epochs", [row["epochs"] for row in rows]),
        ("steps", [row["steps"] for row in rows]),
        (goal.metric, [_cell(row, goal.metric) + " (best)" * row["best"] for row in rows]),
        *((name, [_cell(row, name) for row in rows]) for name in others),
        ("samples/s", [row["samples_per_s"] for row in rows]),
        ("message", [row["message"] or None for row in rows]),
    ]
    shown = [column for column in columns if any(cell is not None for cell in column[1])]
    cells = [["-" if cell is None else str(cell) for cell in column] for _, column in shown]
    return [heading for heading, _ in shown], [list(row) for row in zip(*cells, strict=True)]


def _cell(row: Object, metric: str) -> str:
    value = row["metrics"].get(metric)
    return "-" if value is None else f"{value:.4g}"


def outcome_text(outcome: SweepOutcome, goal: Goal, *, is_new: bool) -> str:
    """Return the outcome of a run as one line of text."""
    if outcome.phase != "succeeded":
        return f"{outcome.phase}: {outcome.message}".removesuffix(": ")
    value = outcome.metrics.get(goal.metric)
    result = "" if value is None else f": {goal.metric} {value:.4g}"
    return f"succeeded{'' if is_new else ' before'}{result}"
