"""Gauges have names that Prometheus takes, and the values of the run's records."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from trainyard_trainer.run_folder.gauges import GAUGES, Gauge, readings
from trainyard_trainer.run_folder.progress import Report


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_a_gauge_is_named_as_prometheus_wants(gauge: Gauge) -> None:
    assert re.fullmatch(r"trainyard_[a-z_]+", gauge.name)
    assert gauge.help.endswith(".")
    # Units are in the name, in full.
    assert gauge.key.endswith("_s") == gauge.name.endswith(("_seconds", "_second"))
    assert gauge.key.endswith("_bytes") == gauge.name.endswith("_bytes")


def test_no_two_gauges_share_a_name() -> None:
    assert len({gauge.name for gauge in GAUGES}) == len(GAUGES)


def test_a_record_becomes_values_in_base_units() -> None:
    assert readings({"percent": 12.5, "samples_per_s": 640.0, "epoch": 2, "attempt": 1}) == {
        "trainyard_progress_ratio": 0.125,
        "trainyard_samples_per_second": 640.0,
        "trainyard_epoch": 2,
    }


def test_each_gauge_is_known_to_some_record() -> None:
    of_progress = {"percent", "workers"}
    assert {gauge.key for gauge in GAUGES} <= of_progress | {field.name for field in fields(Report)}


def test_what_is_unknown_has_no_value() -> None:
    assert readings({"loss": None, "eta_s": 0.0}) == {"trainyard_eta_seconds": 0.0}
