"""The numbers that a run shows of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training import open_folder, small_config

from trainer.errors import ConfigError
from trainer.progress import (
    Length,
    Recorder,
    Report,
    Trained,
    eta_s,
    per_second,
    percent,
    read_lines,
    to_json,
)

LENGTH = Length(epochs=4, steps_per_epoch=10, global_batch_size=32)


def report(step: int, *, kind: str = "interval", loss: float = 0.5) -> Report:
    return Report(
        kind=kind,  # type: ignore[arg-type]
        epoch=1,
        step=step,
        samples=step * 32,
        loss=loss,
        accuracy=0.75,
        learning_rate=0.1,
        images_per_s=100.0,
        eta_s=12.3,
        val_loss=0.4,
        val_accuracy=0.9,
    )


def test_a_length_counts_whole_batches_only(tmp_path: Path) -> None:
    length = Length.of(small_config(tmp_path, train__epochs=3), 1437)
    assert (length.steps_per_epoch, length.steps, length.samples) == (11, 33, 33 * 128)


def test_fewer_samples_than_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="= 128 is more than the 100 training samples"):
        Length.of(small_config(tmp_path), 100)


def test_a_rate_of_no_time_is_zero() -> None:
    assert per_second(100, 0.0) == 0.0
    assert per_second(100, 4.0) == 25.0


def test_percent_stays_between_nothing_and_all() -> None:
    assert [percent(samples, 1000) for samples in (0, 333, 1000, 1200)] == [0.0, 33.3, 100.0, 100.0]


def test_the_time_to_go_follows_the_pace_of_this_attempt() -> None:
    # A resumed run at 600 of 1000 that has done 100 in 5 s.
    assert eta_s(1000, 600, 500, 5.0) == 20.0
    assert eta_s(1000, 500, 500, 0.0) == 0.0
    assert eta_s(1000, 1000, 500, 25.0) == 0.0


def test_what_is_no_number_is_null() -> None:
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.25, "d": None, "e": 3}) == (
        '{"a": null, "b": null, "c": 1.25, "d": null, "e": 3}'
    )


def test_a_line_that_was_cut_off_is_no_record(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    folder.append(folder.metrics, '{"step": 1}\n{"step": 2}\n{"ste')
    assert read_lines(folder, folder.metrics) == [{"step": 1}, {"step": 2}]
    assert read_lines(folder, folder.attempts) == []


def test_an_epoch_is_on_disk_when_its_report_returns(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    record = Recorder(folder, LENGTH, attempt=2, workers=3)
    record(report(5))
    record(report(10, kind="epoch"))
    first, last = read_lines(folder, folder.metrics)
    assert (first["kind"], first["step"], "val_accuracy" in first) == ("interval", 5, False)
    assert (last["kind"], last["step"], last["val_accuracy"]) == ("epoch", 10, 0.9)
    assert json.loads(folder.read(folder.progress)) == {
        "percent": 25.0,
        "eta_s": 12.3,
        "epoch": 1,
        "epochs": 4,
        "step": 10,
        "steps": 40,
        "samples": 320,
        "loss": 0.5,
        "accuracy": 0.75,
        "val_accuracy": 0.9,
        "images_per_s": 100.0,
        "attempt": 2,
        "workers": 3,
    }


def test_an_attempt_shows_where_it_starts(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    trained = Trained(epoch=2, step=20, samples=640, val_accuracy=0.8)
    Recorder(folder, LENGTH, attempt=2, workers=1).show_start(trained)
    shown = json.loads(folder.read(folder.progress))
    assert (shown["percent"], shown["epoch"], shown["eta_s"]) == (50.0, 3, None)
