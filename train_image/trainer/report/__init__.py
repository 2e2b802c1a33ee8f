"""The report of a run: one HTML file with its verdict, curves and pictures, readable without a network."""

from __future__ import annotations

from typing import Any

from trainer.config import TrainerConfig
from trainer.data.parquet import Prepared
from trainer.folder import RunFolder
from trainer.progress import read_lines
from trainer.report.page import Findings, render
from trainer.report.pictures import find_mistakes, predict
from trainer.report.verdict import judge


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
        predictions=predict(folder, config.train.model, data),
        mistakes=find_mistakes(data, validation["worst"]),
        accuracy=validation["accuracy"],
        confusion=validation["confusion"],
    )
    folder.write(folder.report, render(config, data, findings))
