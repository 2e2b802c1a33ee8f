"""The goodput of a run: the share of its time that went into steps that were kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training import open_folder, small_config, train_here

from trainyard_trainer.run_folder.measurements.goodput import goodput_of, measure
from trainyard_trainer.run_folder.measurements.progress import Trained

BEGAN = "2026-11-26T12:00:00+00:00"
BEGAN_S = 1795694400.0


def attempt(seconds: float | None, began: str = BEGAN) -> dict[str, Any]:
    """An attempt of run.json that has taken so many seconds; None if it still runs."""
    is_running = seconds is None
    counted = BEGAN_S + (seconds or 0.0)
    return {"began": began, "ended": None if is_running else "then", "counted_until": counted}


TRAINED = Trained(
    seconds={
        "compute": 70.0,
        "communication": 10.0,
        "data": 5.0,
        "validation": 3.0,
        "checkpoint": 2.0,
    }
)


def start(**startup: float) -> dict[str, Any]:
    return {"attempt": 1, "startup": {"began": BEGAN_S, **startup}}


def test_what_is_neither_kept_nor_a_start_is_lost() -> None:
    starts = [{"attempt": 1}, start(ray=3.0, workers=2.0), {"attempt": 2}, start(workers=1.0)]
    found = goodput_of([attempt(60.0), attempt(60.0)], starts, TRAINED, BEGAN_S)
    assert (found.total_s, found.steps_s, found.starts_s) == (120.0, 80.0, 6.0)
    assert found.lost_s == 120.0 - 90.0 - 6.0
    assert found.share == pytest.approx(2 / 3)


def test_an_attempt_that_runs_counts_until_now() -> None:
    found = goodput_of([attempt(40.0), attempt(None)], [], TRAINED, BEGAN_S + 60.0)
    assert found.total_s == 100.0


def test_clocks_that_differ_make_no_goodput_above_one() -> None:
    found = goodput_of([attempt(79.0)], [], TRAINED, BEGAN_S)
    assert (found.share, found.lost_s) == (1.0, 0.0)


def test_a_run_that_has_not_begun_has_no_goodput(tmp_path: Path) -> None:
    assert measure(open_folder(small_config(tmp_path)), Trained(), BEGAN_S) is None


def test_the_parts_of_a_real_run_make_its_whole_time(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    outcome = train_here(config)
    folder = open_folder(config)
    folder.write(folder.run, json.dumps({"record": [attempt(None, BEGAN)]}))
    found = measure(folder, outcome.trained, BEGAN_S + 1000.0)
    assert found is not None
    told = found.to_json()
    parts = ("steps_s", "data_s", "validation_s", "checkpoint_s", "starts_s", "lost_s")
    assert sum(told[part] for part in parts) == pytest.approx(told["total_s"], abs=0.5)
    assert told["starts_s"] > 0
    assert 0 < told["steps_s"] < told["total_s"] == 1000.0
