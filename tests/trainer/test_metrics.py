"""One table of metrics: gauges, TensorBoard curves, charts and documentation follow from its entries."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from trainyard_trainer.config.training.metric import RATIO, Metric
from trainyard_trainer.report.charts import MetricsLines, curves
from trainyard_trainer.run_folder.measurements.metrics import (
    ENGINE_METRICS,
    METRICS,
    Curve,
    Gauge,
    RunMetric,
    gauge_values,
    metrics_page,
    quality_of,
    run_metrics,
    tensorboard_values,
)
from trainyard_trainer.run_folder.measurements.progress import MetricsRecord

NOT_RECORDED = {"percent", "workers", "loop_s", "goodput"}
"""Metrics of progress.json that the recorder computes itself."""

NO_METRICS = {"kind", "metrics", "seconds", "slow_workers"}
"""What is recorded beside metrics."""

OF_RECIPES = {"rows_per_s", "tokens_per_s", "mfu"}
"""Speeds that only some recipes have."""

TEMPERATURE = RunMetric(
    name="temperature",
    unit="K",
    description="Temperature of the GPU.",
    direction="lower",
    gauge=Gauge(name="trainyard_temperature_kelvin"),
    tags={"interval": "speed/temperature"},
    curve=Curve(chart="Temperature", label="GPU"),
)


@pytest.mark.parametrize(
    "metric", [metric for metric in METRICS if metric.gauge], ids=lambda metric: metric.name
)
def test_a_gauge_is_named_as_prometheus_wants(metric: RunMetric) -> None:
    assert metric.gauge is not None
    assert re.fullmatch(r"trainyard_[a-z_]+", metric.gauge.name)
    assert metric.description.endswith(".")
    # Units are in the name, in full.
    assert metric.name.endswith("_s") == metric.gauge.name.endswith(("_seconds", "_second"))
    assert metric.name.endswith("_bytes") == metric.gauge.name.endswith("_bytes")


def test_names_gauges_and_tags_are_unique() -> None:
    for names in (
        [metric.name for metric in METRICS],
        [metric.gauge.name for metric in METRICS if metric.gauge],
        [tag for metric in METRICS for tag in set(metric.tags.values())],
    ):
        assert len(set(names)) == len(names)


def test_each_metric_is_recorded_and_each_recorded_number_is_a_metric() -> None:
    recorded = {field.name for field in fields(MetricsRecord)} - NO_METRICS
    names = {metric.name for metric in ENGINE_METRICS}
    assert names == recorded | {"loss", "val_loss"} | NOT_RECORDED | OF_RECIPES


def test_a_metric_of_a_recipe_has_a_gauge_a_curve_and_a_chart() -> None:
    dice = Metric(name="dice", direction="higher", description="overlap of the masks", unit=RATIO)
    table = run_metrics([dice])
    line = {"kind": "epoch", "epoch": 1, "step": 5, "dice": 0.5, "val_dice": 0.25}
    assert gauge_values(line, table) == {
        "trainyard_epoch": 1,
        "trainyard_step": 5,
        "trainyard_dice_ratio": 0.5,
        "trainyard_validation_dice_ratio": 0.25,
    }
    assert tensorboard_values(line, table) == {"epoch/dice": 0.5, "val/dice": 0.25}
    (chart,) = curves(MetricsLines([line]), 1, metrics=table)
    assert (chart.title, [one.name for one in chart.lines]) == ("Dice", ["training", "validation"])
    assert not {"accuracy", "rmse"} & {metric.name for metric in table}


def test_what_a_line_tells_of_the_model_is_its_loss_and_the_metrics_of_its_recipe() -> None:
    line = {"kind": "epoch", "attempt": 1, "step": 5, "mfu": 0.4, "loss": 2.0, "dice": 0.5}
    assert quality_of(line | {"val_loss": 3.0}) == {"loss": 2.0, "dice": 0.5, "val_loss": 3.0}


def test_curves_of_one_chart_are_drawn_alike() -> None:
    charts: dict[str, set[tuple[bool, bool]]] = {}
    for metric in METRICS:
        if metric.curve:
            kind = (metric.curve.is_quality, metric.curve.is_log)
            charts.setdefault(metric.curve.chart, set()).add(kind)
    assert all(len(kinds) == 1 for kinds in charts.values())


def test_a_record_becomes_gauge_values_in_base_units() -> None:
    assert gauge_values({"percent": 12.5, "samples_per_s": 640.0, "epoch": 2, "attempt": 1}) == {
        "trainyard_progress_ratio": 0.125,
        "trainyard_samples_per_second": 640.0,
        "trainyard_epoch": 2,
    }


def test_an_unknown_value_has_no_gauge_value() -> None:
    assert gauge_values({"loss": None, "eta_s": 0.0}) == {"trainyard_eta_seconds": 0.0}


def test_a_new_metric_is_one_entry_of_the_table() -> None:
    metrics = (*METRICS, TEMPERATURE)
    line = {"kind": "interval", "epoch": 1, "step": 5, "temperature": 330.0}
    assert gauge_values(line, metrics)["trainyard_temperature_kelvin"] == 330.0
    assert tensorboard_values(line, metrics) == {"speed/temperature": 330.0}
    lines = MetricsLines([line, {"kind": "epoch", "epoch": 1, "step": 10}])
    (chart,) = curves(lines, None, metrics=metrics)
    assert (chart.title, chart.lines[0].points) == ("Temperature", [(0.5, 330.0)])
    assert "| `temperature` | K | lower | Temperature of the GPU. |" in metrics_page(metrics)


def test_lines_that_lack_a_metric_leave_a_gap() -> None:
    """Lines of an older image do not have the metrics that were added since."""
    lines = MetricsLines(
        [
            {"kind": "epoch", "epoch": 1, "step": 10, "loss": 2.0},
            {"kind": "epoch", "epoch": 2, "step": 20, "loss": 1.0, "val_loss": 1.5},
            {"kind": "epoch", "epoch": 3, "step": 30, "val_loss": 1.25},
        ]
    )
    (loss,) = curves(lines, best_epoch=3)
    assert [line.points for line in loss.lines] == [[(1, 2.0), (2, 1.0)], [(2, 1.5), (3, 1.25)]]


def test_the_speed_of_the_recipe_replaces_samples_per_second() -> None:
    lines = [{"kind": "epoch", "epoch": 1, "step": 10, "samples_per_s": 5.0}]
    assert [chart.title for chart in curves(MetricsLines(lines), None)] == ["Samples per second"]
    lines[0]["tokens_per_s"] = 640.0
    assert [chart.title for chart in curves(MetricsLines(lines), None)] == ["Tokens per second"]


def test_there_are_no_charts_before_the_first_epoch_has_ended() -> None:
    lines = MetricsLines([{"kind": "interval", "epoch": 1, "step": 5, "loss": 2.0}])
    assert list(curves(lines, None)) == []
