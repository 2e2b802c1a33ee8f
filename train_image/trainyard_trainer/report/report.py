"""The report of a run: one HTML file with its verdict, curves and samples, readable without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.metric import Metric
from trainyard_trainer.data.loading.rows import RunData
from trainyard_trainer.report.page import RecipeReport, ReportContents, render
from trainyard_trainer.report.verdict import judge
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.metrics import run_metrics
from trainyard_trainer.run_folder.measurements.progress import read_lines


def write_report(
    folder: RunFolder,
    config: TrainerConfig,
    data: RunData,
    summary: dict[str, Any],
    own: RecipeReport,
    recipe_metrics: Sequence[Metric],
) -> None:
    """Make report.html of what lies in the run's folder.

    `summary` is what summary.json will hold, `own` the part that the recipe adds, and `recipe_metrics` are
    the recipe's own metrics.
    """
    findings = ReportContents(
        summary=summary,
        metrics=read_lines(folder, folder.metrics),
        table=run_metrics(recipe_metrics),
        attempts=read_lines(folder, folder.attempts),
        verdict=judge(summary["seconds"], config, epochs=summary["epochs"], images=data.info),
        own=own,
    )
    folder.write(folder.report, render(config, data, findings))
