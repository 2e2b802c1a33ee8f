"""The report of a run with `train.recipe: gradient_boosting`: curves over rounds and feature importance."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from trainyard_trainer.boosting.libraries import Importance
from trainyard_trainer.boosting.table import PreparedTable
from trainyard_trainer.config.trainer_config import BoostingConfig
from trainyard_trainer.config.training.recipes import best_goal
from trainyard_trainer.report.charts import MetricsLines, curves, draw_bars
from trainyard_trainer.report.elements import count, table
from trainyard_trainer.report.page import (
    Tile,
    attempts,
    charts,
    document,
    flat,
    run_record,
    section,
    tiles,
    time_card,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Trained, read_lines

MOST_BARS = 30
"""The largest number of columns in the chart. The table below the chart has all columns."""

NAME_LENGTH = 40
"""The length to which names of columns are cut in the chart."""

LOSSES = {"binary": "Log loss", "multiclass": "Log loss", "regression": "Mean squared error"}


def write_report(
    folder: RunFolder,
    config: BoostingConfig,
    data: PreparedTable,
    summary: dict[str, Any],
    delivered: Trained,
    importance: Sequence[Importance],
    title: str,
) -> None:
    """Write report.html from the records in the run's folder. `summary` is the content of summary.json."""
    drawn = curves(
        MetricsLines(read_lines(folder, folder.metrics)),
        summary["best_epoch"],
        unit="round",
        titles={"Loss": LOSSES[config.train.objective]},
    )
    about = (
        f"{title} on {data.source}, {count(summary['rounds'], 'round')}, "
        f"{count(summary['workers'], 'CPU worker')}"
    )
    headline = tiles(
        result_tile(delivered),
        summary["train_s"],
        (
            Tile("rows per second", f"{summary['rows_per_s']:,.0f}"),
            Tile("training rows", f"{data.train.rows:,}", count(len(data.columns), "column")),
        ),
        attempts_so_far=summary["attempts"],
    )
    settings = table(("setting", "value"), flat(config.model_dump(mode="json")))
    sections = (
        section("Curves", charts(drawn)),
        section("Feature importance", importance_of(importance)),
        section("Data and outcome", facts(config, data, summary, delivered)),
        section("Time", time_card(summary)),
        section("Attempts", attempts(read_lines(folder, folder.attempts))),
        section("Where and with what", run_record(summary)),
        section("Settings", settings),
    )
    folder.write(folder.report, document(config.name, about, headline, sections))


def result_tile(delivered: Trained) -> Tile:
    """Return the tile with the metric of the delivered model."""
    metrics = delivered.metrics
    if "val_rmse" in metrics:
        squared = f"mean squared error {metrics['val_loss']:.4g}"
        return Tile("validation RMSE", f"{metrics['val_rmse']:.4g}", squared)
    loss = f"log loss {metrics['val_loss']:.4f}"
    return Tile("validation accuracy", f"{metrics['val_accuracy']:.2%}", loss)


def importance_of(found: Sequence[Importance]) -> str:
    """Return a chart and a table of each column's share of the gain of all splits."""
    whole = sum(each.gain for each in found) or 1.0
    ordered = sorted(found, key=lambda each: -each.gain)
    bars = [(shortened(each.column), each.gain / whole) for each in ordered[:MOST_BARS]]
    figure = draw_bars("share of the gain of all splits", bars)
    rows = table(
        ("column", "share of the gain", "gain", "splits"),
        (
            (each.column, f"{each.gain / whole:.2%}", f"{each.gain:.4g}", f"{each.splits:,}")
            for each in ordered
        ),
    )
    heading = escape(f"Table of all {count(len(ordered), 'column')}")
    return (
        f'<figure class="chart">{figure}</figure>'
        f"<details><summary>{heading}</summary>{rows}</details>"
    )


def shortened(name: str) -> str:
    """Return a column's name for the chart, cut to `NAME_LENGTH` characters."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


def facts(
    config: BoostingConfig, data: PreparedTable, summary: dict[str, Any], delivered: Trained
) -> str:
    """Return the table with the data, the label and the metrics of the delivered checkpoint."""
    goal = best_goal(config.train, config.checkpoint.best)
    kept = "separate files" if data.train.share is None else f"{data.train.share:g} of the rows"
    known = ", ".join(map(str, data.classes[:10])) + (" ..." if len(data.classes) > 10 else "")
    return table(
        (),
        (
            ("training rows", f"{data.train.rows:,}"),
            ("validation rows", f"{data.valid.rows:,}, {kept}"),
            ("label", data.label + (f": {known}" if known else ", a number")),
            (
                f"validation {LOSSES[config.train.objective].lower()}",
                f"{delivered.metrics['val_loss']:.6g}",
            ),
            ("best saved round", f"{summary['best_epoch']}, by {goal.name}"),
            ("delivered checkpoint", f"{summary['checkpoint']} ({config.checkpoint.deliver})"),
        ),
    )
