"""The report of a run: one HTML file with its verdict, curves and samples, readable without a network."""

from __future__ import annotations

from typing import Any

from trainer.config import TrainerConfig
from trainer.data.parquet import Prepared
from trainer.progress import read_lines
from trainer.recipe import recipe_of
from trainer.report.page import Findings, render
from trainer.report.verdict import judge
from trainer.run_folder import RunFolder


def write_report(
    folder: RunFolder,
    config: TrainerConfig,
    data: Prepared,
    summary: dict[str, Any],
    validation: dict[str, Any],
) -> None:
    """Make report.html of what lies in the run's folder.

    `summary` is what summary.json will hold, `validation` the validation.json of the delivered checkpoint.
    """
    findings = Findings(
        summary=summary,
        metrics=read_lines(folder, folder.metrics),
        attempts=read_lines(folder, folder.attempts),
        verdict=judge(summary["seconds"], config, epochs=summary["epochs"], images=data.images),
        own=recipe_of(config.train).findings(folder, config, data, summary, validation),
    )
    folder.write(folder.report, render(config, data, findings))
