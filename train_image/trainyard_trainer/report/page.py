"""The HTML page of the report of a run that trains a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.recipes import best_goal
from trainyard_trainer.data.loading.rows import RunData
from trainyard_trainer.report.charts import Chart, MetricsLines, curves, draw
from trainyard_trainer.report.elements import count, duration, table
from trainyard_trainer.report.verdict import Verdict
from trainyard_trainer.run_files.names import RECORD
from trainyard_trainer.run_files.record_text import (
    GOODPUT_PARTS,
    HEADINGS,
    NODE_HEADINGS,
    attempt_row,
    node_rows,
)
from trainyard_trainer.run_folder.measurements.metrics import RunMetric

PARTS = {
    "startup": ("Start-up", "from the start of an attempt to its first step"),
    "data": ("Data", "waiting for batches"),
    "compute": ("Compute", "the steps themselves"),
    "communication": ("Communication", "exchange of gradients that did not overlap with computing"),
    "checkpoint": ("Checkpoints", "training waited for a checkpoint"),
    "validation": ("Validation", "after each epoch"),
}
"""The title and the meaning of each phase of `progress.TIME_PHASES`."""

WITH_EXCHANGE = "training steps, including communication"
"""The meaning of `compute` in runs that do not measure `communication`."""


class Tile(NamedTuple):
    """A value in large print at the top of the page."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeReport:
    """The parts of the page that a recipe provides."""

    title: str
    """A short name of the model."""
    result: Tile
    """The most important metric of the delivered model."""
    speed: tuple[Tile, ...]
    """The training speed in the units of the recipe."""
    sections: tuple[tuple[str, str], ...]
    """The title and the HTML of further sections."""
    facts: tuple[tuple[str, str], ...]
    """Names and values that describe the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContents:
    """The content of the page, except for the config and the data of the run."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    table: Sequence[RunMetric]
    """The metrics that the lines of `metrics` can have."""
    attempts: list[dict[str, Any]]
    verdict: Verdict
    own: RecipeReport


def render(config: TrainerConfig, data: RunData, findings: ReportContents) -> str:
    """Return the whole page as HTML."""
    summary, own = findings.summary, findings.own
    drawn = curves(MetricsLines(findings.metrics), summary["best_epoch"], metrics=findings.table)
    sections = (
        section("What bounds it", verdict_card(findings.verdict) + time_card(summary)),
        section("Curves", charts(drawn)),
        *(section(title, content) for title, content in own.sections),
        section("Data and outcome", facts(config, own, summary)),
        section("Attempts", attempts(findings.attempts)),
        section("Where and with what", run_record(summary)),
        section("Settings", table(("setting", "value"), flat(config.model_dump(mode="json")))),
    )
    headline = tiles(own.result, summary["train_s"], own.speed, attempts_so_far=summary["attempts"])
    return document(config.name, subtitle(config, data, own, summary), headline, sections)


def document(name: str, about: str, headline: str, sections: Iterable[str]) -> str:
    """Return an HTML document with a title, a subtitle, the headline and the sections."""
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)} - trainyard</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{escape(name)}</h1><p>{escape(about)}</p></header>
{headline}
{"".join(sections)}
</main>
</body>
</html>
"""


def section(title: str, content: str) -> str:
    """Return a section of the page with a heading."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


# Result, speed and curves.


def subtitle(
    config: TrainerConfig, data: RunData, own: RecipeReport, summary: Mapping[str, Any]
) -> str:
    """Return one line with the model, the data, the epochs and the workers."""
    scaling = config.scaling
    device = "GPU" if scaling.use_gpu else "CPU"
    epochs = count(summary["epochs"], "epoch")
    if summary["stopped_early"]:
        epochs = f"stopped early after {epochs} of {config.train.epochs}"
    ends = f" at the end, of {scaling.min_workers} to {scaling.num_workers}"
    return (
        f"{own.title} on {data.info.source}, {epochs}, "
        f"{count(summary['workers'], f'{device} worker')}{ends if scaling.min_workers else ''}"
    )


def tiles(result: Tile, train_s: float, speed: Iterable[Tile], *, attempts_so_far: int) -> str:
    """Return the values in large print: result, training time, speed and number of attempts."""
    headline = (
        result,
        Tile("training time", duration(train_s)),
        *speed,
        Tile("attempt" if attempts_so_far == 1 else "attempts", f"{attempts_so_far}"),
    )
    cards = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span>'
        f"<small>{escape(more)}</small></div>"
        for name, value, more in headline
    )
    return f'<section class="tiles">{cards}</section>'


def verdict_card(verdict: Verdict) -> str:
    """Return the bottleneck of the run, with the key of the run file to change."""
    kind = verdict.kind.removesuffix("-bound")
    return (
        f'<div class="card verdict {kind}"><h3>{escape(verdict.kind.capitalize())}'
        f"<em>{verdict.share:.0%}</em></h3><p>{escape(verdict.sentence)}</p>"
        f'<p class="remedy"><span>the line to change</span>'
        f"<code>{escape(verdict.remedy)}</code></p></div>"
    )


def time_card(summary: Mapping[str, Any]) -> str:
    """Return the time of each measured phase, as a bar and as a table, and the goodput of all attempts."""
    seconds: Mapping[str, float] = summary["seconds"]
    whole = sum(seconds.values())
    shares = {part: seconds[part] / whole for part in PARTS if part in seconds}
    meanings = {part: meaning for part, (_, meaning) in PARTS.items()}
    if "communication" not in seconds:
        meanings["compute"] = WITH_EXCHANGE
    bar = "".join(
        f'<i class="{part}" style="flex-grow:{share:.5f}" title="{PARTS[part][0]} {share:.1%}"></i>'
        for part, share in shares.items()
        if share > 0
    )
    rows = "".join(
        f'<tr><td><i class="{part}"></i>{escape(PARTS[part][0])}</td><td class="number">{share:.1%}</td>'
        f'<td class="number">{duration(seconds[part])}</td>'
        f'<td class="soft">{escape(meanings[part])}</td></tr>'
        for part, share in shares.items()
    )
    return (
        f'<div class="card time"><h3>Where the time went<em>{duration(whole)}, rank 0</em></h3>'
        f'<div class="stack">{bar}</div><table><tbody>{rows}</tbody></table>'
        f"{goodput_line(summary['goodput'])}</div>"
    )


def goodput_line(goodput: Mapping[str, Any] | None) -> str:
    """Return the share of the workers' time that went into steps that were kept, and where the rest went."""
    if goodput is None:
        return ""
    rest = ", ".join(
        f"{words} {duration(goodput[part])}"
        for part, words in GOODPUT_PARTS.items()
        if part != "steps_s" and goodput[part]
    )
    between = goodput["between_attempts_s"]
    beside = f" The run had no workers for {duration(between)} between attempts." if between else ""
    return (
        f'<p class="soft">Goodput {goodput["share"]:.1%}: of {duration(goodput["total_s"])} of all workers '
        f"together, {duration(goodput['steps_s'])} went into {GOODPUT_PARTS['steps_s']}"
        f"{f'. The rest: {rest}' if rest else ''}.{beside}</p>"
    )


def charts(drawn: Iterable[Chart]) -> str:
    """Return the charts with their titles."""
    figures = "".join(
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>{draw(chart)}</figure>'
        for chart in drawn
    )
    return f'<div class="charts">{figures}</div>'


# Data, attempts and settings.


def facts(config: TrainerConfig, own: RecipeReport, summary: Mapping[str, Any]) -> str:
    """Return a table that describes the data and the delivered checkpoint."""
    goal = best_goal(config.train, config.checkpoint.best)
    return table(
        (),
        (
            *own.facts,
            ("left over in each epoch (data.drop_last)", f"{summary['dropped_per_epoch']:,}"),
            ("best epoch", f"{summary['best_epoch'] or 'unknown'}, by {goal.name}"),
            ("delivered checkpoint", f"{summary['checkpoint']} ({config.checkpoint.deliver})"),
            ("stopped early", "yes" if summary["stopped_early"] else "no"),
        ),
    )


def attempts(lines: Iterable[dict[str, Any]]) -> str:
    """Return a table of the attempts: start, checkpoint and versions."""
    return table(
        ("attempt", "started", "from checkpoint", "versions"),
        (
            (
                str(line["attempt"]),
                f"{datetime.fromisoformat(line['time']):%Y-%m-%d %H:%M:%S %Z}",
                line["resumed_from"] or "start",
                ", ".join(f"{name} {version}" for name, version in line["versions"].items()),
            )
            for line in lines
        ),
    )


def run_record(summary: Mapping[str, Any]) -> str:
    """Return the hardware and software of each attempt, a column for each, and a table of the nodes."""
    record = summary[RECORD]
    head, *rows = zip(HEADINGS, *map(attempt_row, record), strict=True)
    nodes = node_rows(record)
    return (
        f"{table(head, rows)}<details><summary>Nodes and GPUs: {len(nodes)}</summary>"
        f"{table(NODE_HEADINGS, nodes)}</details>"
    )


def flat(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path, such as `train.model.name`, and the value of each setting."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value if isinstance(value, str) else json.dumps(value)
