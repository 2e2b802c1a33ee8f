"""Explain the errors of XGBoost and LightGBM, and decide which of them a retry can cure.

Both libraries compute the same result from the same rows, settings and seed. Their errors are therefore
final, with two exceptions: an error of the communication between the workers, and an error of the machine,
such as too little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from trainyard_trainer.config.training.boosting import Boosting
from trainyard_trainer.errors import RunError, TrainerError

COMMUNICATION = re.compile(
    # XGBoost puts the source file of an error into its message.
    r"/src/collective/|"
    # LightGBM has no other mark than its words (src/network/).
    r"^Socket |^Binding port|^Machine list file|^Cannot find any ip|^Please initialize the network"
)
"""Errors of the communication between the workers."""

MACHINE = re.compile(r"bad_alloc|bad_malloc|Resource temporarily unavailable")
"""Errors of the machine: too little memory, too many threads or processes."""

KEYS: Mapping[str, str] = {
    "eta": "learning_rate",
    "gamma": "min_split_gain",
    "min_split_loss": "min_split_gain",
    "min_gain_to_split": "min_split_gain",
    "min_sum_hessian_in_leaf": "min_child_weight",
    "num_leaves": "max_leaves",
    "lambda_l1": "reg_alpha",
    "lambda_l2": "reg_lambda",
    "bagging_fraction": "subsample",
    "feature_fraction": "colsample_bytree",
}
"""The keys of `train`, by the library's name of the parameter where it is another one."""

PARAMETER = re.compile(
    r"for Parameter (\w+) |Invalid Parameter format for (\w+) |Out of range value for (\w+),|"
    r"Parameter (\w+) should be of type|Check failed: \((\w+)\).* at \S*config_auto\.cpp"
)
"""Errors about the value of one parameter, whose name is the only group that matches."""


class KnownError(NamedTuple):
    """An error of a library that has an explanation of its own."""

    pattern: re.Pattern[str]
    problem: str
    remedy: str


KNOWN = (
    KnownError(
        re.compile(r"Unknown objective|Unknown metric"),
        "does not know the objective or the metric",
        "Use an image whose version of the library knows train.objective.",
    ),
    KnownError(
        re.compile(r"label must be|base_score must be|Label must be in|Label contains NaN"),
        "cannot learn from a label, which is outside of the range of the objective",
        "Check the column data.label_column, and train.objective.",
    ),
    KnownError(
        re.compile(r"Input data contains `inf`"),
        "cannot use a feature column, which has an infinite or too large number",
        "Remove or scale such values, or leave the column out with data.feature_columns.",
    ),
    KnownError(
        re.compile(r"Check failed: \(num_data\) > \(0\)"),
        "has drawn no row for a round",
        "Use a larger train.subsample, or fewer workers.",
    ),
)


class BoostingError(RunError):
    """XGBoost or LightGBM refuses the rows or the settings, and would refuse them again in a retry."""

    is_final = True


@contextmanager
def explained_errors(library: str, kind: type[Exception]) -> Iterator[None]:
    """Raise an explained error in place of a library's error.

    It is a BoostingError if a retry cannot cure it, and otherwise a RunError.
    """
    try:
        yield
    except kind as error:
        raise explain(library, str(error)) from error


def explain(library: str, text: str) -> TrainerError:
    """Return the error that explains a library's message: problem, remedy, and the words of the library."""
    message = text.partition("Stack trace:")[0].strip()
    reported = f"\n       {library} reports: {_words(message)}"
    if COMMUNICATION.search(message):
        return RunError(
            f"the {library} workers have lost their connection: a worker ended, or the network failed. The "
            f"run resumes from its newest checkpoint when it is started again.{reported}"
        )
    if MACHINE.search(message):
        return RunError(
            f"{library} got too little memory, or too few threads, on the machine of a worker.\n"
            "       Use more workers, so that each holds fewer rows, or more memory per worker, or fewer "
            f"columns (data.feature_columns).{reported}"
        )
    if parameter := PARAMETER.search(message):
        name = next(filter(None, parameter.groups()))
        key = KEYS.get(name, name)
        setting = f"train.{key}" if key in Boosting.model_fields else f"its parameter {name}"
        return BoostingError(
            f"{library} refuses the value of {setting}.\n       Change the section train of the run file."
            f"{reported}"
        )
    for known in KNOWN:
        if known.pattern.search(message):
            return BoostingError(f"{library} {known.problem}.\n       {known.remedy}{reported}")
    return BoostingError(
        f"{library} refuses the rows or the settings of the run.\n       Check the values and types of the "
        f"data, and the settings in train.{reported}"
    )


def _words(message: str) -> str:
    """Return a library's message in one line, without time, source file and failed C++ condition."""
    own = re.sub(r"^\[[\d:]+\] \S+:\d+: (Check failed: [^:]*: )?", "", message)
    lines = (
        re.sub(r"^- ?|\[[\w.]+:\d+\|[\d:]+\]:? ?", "", line.strip()) for line in own.splitlines()
    )
    return "; ".join(line.strip().rstrip(".") for line in lines if line.strip()) or "no reason"
