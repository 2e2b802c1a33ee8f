"""The report of a run of `gradient_boosting`: curves over rounds, and which columns the trees ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from trainyard_trainer.boosting.libraries import Importance
from trainyard_trainer.boosting.table import PreparedTable
from trainyard_trainer.config.trainer_config import BoostingConfig
from trainyard_trainer.report.charts import MetricsLines, curves, draw_bars
from trainyard_trainer.report.elements import count, table
from trainyard_trainer.report.page import (
    Tile,
    attempts,
    charts,
    document,
    flat,
    section,
    tiles,
    time_card,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import Trained, read_lines

MOST_BARS = 30
"""Columns in the chart; the table below it has them all."""

NAME_LENGTH = 40

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
    """Make report.html of what lies in the run's folder; `summary` is what summary.json will hold."""
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
        section("What the trees ask for", importance_of(importance)),
        section("Data and outcome", facts(config, data, summary, delivered)),
        section("Time", time_card(summary["seconds"])),
        section("Attempts", attempts(read_lines(folder, folder.attempts))),
        section("Settings", settings),
    )
    folder.write(folder.report, document(config.name, about, headline, sections))


def result_tile(delivered: Trained) -> Tile:
    """How well the delivered model does."""
    assert delivered.val_loss is not None  # it comes with each round
    if delivered.val_accuracy is None:
        squared = f"mean squared error {delivered.val_loss:.4g}"
        return Tile("validation RMSE", f"{math.sqrt(delivered.val_loss):.4g}", squared)
    loss = f"log loss {delivered.val_loss:.4f}"
    return Tile("validation accuracy", f"{delivered.val_accuracy:.2%}", loss)


def importance_of(found: Sequence[Importance]) -> str:
    """Each column's share of what all splits have gained, as a chart and in figures."""
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
    heading = escape(f"All {count(len(ordered), 'column')} in figures")
    return (
        f'<figure class="chart">{figure}</figure>'
        f"<details><summary>{heading}</summary>{rows}</details>"
    )


def shortened(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


def facts(
    config: BoostingConfig, data: PreparedTable, summary: dict[str, Any], delivered: Trained
) -> str:
    kept = "files of their own" if data.train.share is None else f"{data.train.share:g} of the rows"
    known = ", ".join(map(str, data.classes[:10])) + (" ..." if len(data.classes) > 10 else "")
    return table(
        (),
        (
            ("training rows", f"{data.train.rows:,}"),
            ("validation rows", f"{data.valid.rows:,}, {kept}"),
            ("label", data.label + (f": {known}" if known else ", a number")),
            (f"validation {LOSSES[config.train.objective].lower()}", f"{delivered.val_loss:.6g}"),
            ("best round that was saved", f"{summary['best_epoch']}, by {config.checkpoint.best}"),
            ("delivered checkpoint", f"{summary['checkpoint']} ({config.checkpoint.deliver})"),
        ),
    )
