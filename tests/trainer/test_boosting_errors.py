"""Errors of XGBoost and LightGBM: which of them a retry cannot cure, and how they are explained."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, read_json, read_records
from test_gradient_boosting import BOTH, boost, houses, of_houses, trees

from trainyard_trainer.boosting.libraries import LIBRARIES
from trainyard_trainer.boosting.library_errors import BoostingError, explain
from trainyard_trainer.boosting.table import PreparedTable, Rows, read_share
from trainyard_trainer.errors import RunError, TrainerError

XGBOOST = pytest.param("xgboost", "XGBoost", id="xgboost")
LIGHTGBM = pytest.param("lightgbm", "LightGBM", id="lightgbm")


def set_parameters(monkeypatch: pytest.MonkeyPatch, library: str, **wrong: Any) -> None:
    """Let the library get other parameters than those that follow from the run file."""
    boosting = LIBRARIES[library]
    settings = boosting._settings
    monkeypatch.setattr(boosting, "_settings", lambda task: settings(task) | wrong)


@pytest.mark.parametrize(
    ("library", "key", "value"),
    [
        ("xgboost", "learning_rate", 1e39),
        ("xgboost", "min_split_gain", 1e300),
        ("xgboost", "reg_lambda", 1e39),
    ],
)
def test_a_value_that_the_library_refuses_is_named_by_its_key(
    tmp_path: Path, library: str, key: str, value: float
) -> None:
    config = trees(tmp_path, train__library=library, **{f"train__{key}": value})
    with pytest.raises(BoostingError) as raised:
        boost(config)
    first, remedy, reported = str(raised.value).splitlines()
    assert first == f"XGBoost refuses the value of train.{key}."
    assert remedy.strip() == "Change the section train of the run file."
    assert reported.strip().startswith("XGBoost reports: Out of range value for ")
    assert raised.value.is_final


@pytest.mark.parametrize(
    ("library", "wrong", "message"),
    [
        ("xgboost", {"max_depth": -3}, r"XGBoost refuses the value of train\.max_depth"),
        ("xgboost", {"max_depth": "deep"}, r"refuses the value of train\.max_depth"),
        ("xgboost", {"objective": "none"}, "XGBoost does not know the objective"),
        ("xgboost", {"eval_metric": "none"}, "XGBoost does not know the objective or the metric"),
        (
            "xgboost",
            {"objective": "count:poisson", "max_delta_step": -1},
            "XGBoost refuses the value of its parameter max_delta_step",
        ),
        (
            "lightgbm",
            {"lambda_l1": -1},
            r"LightGBM refuses the value of train\.reg_alpha",
        ),
        ("lightgbm", {"max_depth": "deep"}, r"LightGBM refuses the value of train\.max_depth"),
        ("lightgbm", {"objective": "nonsense"}, "LightGBM does not know the objective"),
        (
            "lightgbm",
            {"objective": "multiclass", "num_class": 1},
            "LightGBM refuses the rows or the settings",
        ),
    ],
)
def test_wrong_parameters_are_final_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library: str,
    wrong: dict[str, Any],
    message: str,
) -> None:
    set_parameters(monkeypatch, library, **wrong)
    with pytest.raises(BoostingError, match=message) as raised:
        boost(trees(tmp_path, train__library=library))
    assert "Stack trace" not in str(raised.value)
    assert "/workspace/src" not in str(raised.value)


@BOTH
def test_labels_out_of_range_are_a_final_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    wrong = {
        "xgboost": {"objective": "multi:softprob"},
        "lightgbm": {"objective": "multiclass", "metric": []},
    }
    set_parameters(monkeypatch, library, num_class=2, **wrong[library])
    with pytest.raises(BoostingError, match="a label, which is outside of the range"):
        boost(of_houses(houses(tmp_path / "houses"), train__library=library))


def test_infinite_features_are_a_final_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_houses(houses(tmp_path / "houses"))

    def read_with_infinity(table: PreparedTable, *part: Any) -> Rows:
        rows = read_share(table, *part)
        rows.features[3, 1] = math.inf
        return rows

    monkeypatch.setattr("trainyard_trainer.boosting.rounds.read_share", read_with_infinity)
    with pytest.raises(BoostingError, match="infinite or too large number"):
        boost(config)


def test_a_share_that_draws_no_row_is_a_final_error(tmp_path: Path) -> None:
    config = trees(tmp_path, train__library="lightgbm", train__subsample=1e-6)
    with pytest.raises(BoostingError, match="has drawn no row for a round") as raised:
        boost(config)
    assert "Use a larger train.subsample" in str(raised.value)


@pytest.mark.parametrize(
    ("library", "text", "message"),
    [
        ("XGBoost", "std::bad_alloc", "too little memory"),
        ("LightGBM", "Resource temporarily unavailable", "too little memory"),
        ("LightGBM", "Binding port 57003 failed", "have lost their connection"),
        (
            "LightGBM",
            "Socket send error, Broken pipe (code: 32)",
            "reports: Socket send error, Broken pipe",
        ),
        (
            "XGBoost",
            "[19:10:48] /workspace/src/collective/result.cc:83: [comm.cc:220|19:10:48]:\n\n"
            "- [comm.cc:41|19:10:48]: Failed to connect to the tracker.\n"
            "- [socket.h:348|19:10:48]: Socket error. Connection refused\nStack trace:\n  [bt] (0) x\n",
            "reports: Failed to connect to the tracker; Socket error. Connection refused$",
        ),
    ],
)
def test_errors_of_network_and_machine_are_tried_again(
    library: str, text: str, message: str
) -> None:
    error = explain(library, text)
    assert type(error) is RunError
    assert not error.is_final
    with pytest.raises(TrainerError, match=message):
        raise error


TWO_WORKERS = Path(__file__).with_name("two_boosting_workers.py")


@pytest.mark.ci
@pytest.mark.parametrize(("library", "title"), [XGBOOST, LIGHTGBM])
def test_a_worker_that_loses_the_other_one_may_be_started_again(
    tmp_path: Path, library: str, title: str
) -> None:
    ended = subprocess.run(
        [sys.executable, str(TWO_WORKERS), library, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kind, is_final, first = ended.stdout.splitlines()[-3:]
    assert (kind, is_final) == ("RunError", "False")
    assert first.startswith(f"the {title} workers have lost their connection: a worker ended")


@pytest.mark.ci
def test_a_run_with_a_value_that_the_library_refuses_is_not_tried_again(attempts: Attempts) -> None:
    keys = {"train__learning_rate": 1e39, "scaling__num_workers": 2}
    config = trees(attempts.storage, **keys)
    output = attempts.finish(config, 1, {"RAY_CLUSTER_NAME": "trees-1a2b3c4d-x7k2p"})
    error = "XGBoost refuses the value of train.learning_rate."
    assert f"error: {error}" in output
    assert read_json(config, "summary.json")["error"] == error
    assert read_json(config, "final-failure.json")["error"].startswith(error)
    assert len(read_json(config, "workers.json")["workers"]) == 2
    assert {failure["group"] for failure in read_records(config, "failures.jsonl")} == {1}
