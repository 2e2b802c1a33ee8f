"""The curves of a run as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainyard_trainer.run_folder.measurements.metrics import METRICS, RunMetric

BLUE, ORANGE, GREY = "#2563eb", "#d9640b", "#8b97a6"

COLOURS = (BLUE, ORANGE, "#0f766e", "#9333ea")
"""The colours of the curves of a chart, in their order."""

STEEP = 20
"""A curve whose values differ by more than this factor is drawn over powers of ten."""

MOST_POINTS = 400
"""Of a curve: about one per pixel that it has on the page."""

PLAIN = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#c5ccd4",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": "#5b6776",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#e3e7ec",
    "legend.frameon": False,
    "text.color": "#5b6776",
    "xtick.color": "#5b6776",
    "ytick.color": "#5b6776",
    # The page's own font, and the same bytes each time.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "svg.hashsalt": "trainyard",
}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve of a chart."""

    name: str
    colour: str
    points: Points
    has_dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of one or more curves over epochs, or over rounds of boosting."""

    title: str
    lines: Sequence[Line]
    is_log: bool = False
    """Whether the vertical axis may be logarithmic, because the values fall by factors as a loss does."""
    best_epoch: int | None = None
    """The epoch to mark as the best one."""
    unit: str = "epoch"
    """What the horizontal axis counts."""


class MetricsLines:
    """The lines of metrics.jsonl as points over epochs. A line without a metric leaves a gap in its curve."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.epochs = [record for record in records if record["kind"] == "epoch"]

    def points(self, metric: RunMetric) -> Points:
        """Return the points of a metric's curve: (epoch, value), for each line that has a value.

        A metric of quality is drawn at the end of each epoch only.
        """
        assert metric.curve is not None
        records = self.epochs if metric.curve.is_quality else self.records
        return thinned(self._points(records, metric.name, metric.curve.scale))

    def has(self, metric: RunMetric) -> bool:
        """Whether any line has a value of the metric."""
        return any(record.get(metric.name) is not None for record in self.records)

    def _points(self, records: list[dict[str, Any]], key: str, scale: float) -> Points:
        steps_per_epoch = self.epochs[0]["step"] / self.epochs[0]["epoch"]
        return [
            (record["step"] / steps_per_epoch, record[key] * scale)
            for record in records
            if record.get(key) is not None
        ]


def curves(
    lines: MetricsLines,
    best_epoch: int | None,
    *,
    unit: str = "epoch",
    titles: Mapping[str, str] | None = None,
    metrics: Iterable[RunMetric] = METRICS,
) -> Iterator[Chart]:
    """Make the charts of all metrics that the lines have values of; none before the first epoch has ended.

    `titles` replaces titles of charts, by their names in the table of metrics.
    """
    if not lines.epochs:
        return
    there = [metric for metric in metrics if metric.curve and lines.has(metric)]
    replaced = {metric.curve.replaces for metric in there if metric.curve}
    charts: dict[str, list[RunMetric]] = {}
    for metric in there:
        if metric.curve and metric.name not in replaced:
            charts.setdefault(metric.curve.chart, []).append(metric)
    for title, drawn in charts.items():
        kinds = [metric.curve for metric in drawn if metric.curve]
        is_quality = kinds[0].is_quality
        yield Chart(
            title=(titles or {}).get(title, title),
            lines=[
                Line(
                    name=curve.label,
                    colour=colour,
                    points=lines.points(metric),
                    has_dots=is_quality and unit == "epoch",
                )
                for metric, curve, colour in zip(drawn, kinds, COLOURS, strict=False)
            ],
            is_log=kinds[0].is_log,
            best_epoch=best_epoch if is_quality else None,
            unit=unit,
        )


def thinned(points: Points) -> Points:
    """Means of neighbours, where there are more points than can be seen."""
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def draw(chart: Chart) -> str:
    """Draw a chart and return it as SVG text."""
    values = [y for line in chart.lines for _, y in line.points]
    is_steep = chart.is_log and min(values, default=0) > 0 and max(values) > STEEP * min(values)
    with rc_context(PLAIN):
        figure = Figure(figsize=(5.2, 2.7), layout="constrained")
        axes = figure.add_subplot(xlabel=chart.unit, yscale="log" if is_steep else "linear")
        for line in chart.lines:
            marker = "o" if line.has_dots else ""
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            axes.plot(x, y, color=line.colour, label=line.name, marker=marker, markersize=3)
        if chart.best_epoch is not None:
            axes.axvline(
                chart.best_epoch,
                color=GREY,
                linestyle=":",
                linewidth=1.2,
                label=f"best {chart.unit}",
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not is_steep:
            axes.set_ylim(bottom=0, top=max(1.08 * max(values, default=0), 1e-9))
        if len(chart.lines) > 1:
            axes.legend()
        return _svg(figure, chart.title)


def draw_bars(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Names with their values as bars that lie, the first one on top, as SVG."""
    names, values = zip(*reversed(bars), strict=True)
    with rc_context(PLAIN | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(8, 0.6 + 0.24 * len(bars)), layout="constrained")
        axes = figure.add_subplot(xlabel=title)
        # By their places: two columns may have the same name once it is shortened.
        axes.barh(range(len(bars)), values, color=BLUE, height=0.7)
        axes.set_yticks(range(len(bars)), names, parse_math=False)
        axes.margins(y=0.01)
        return _svg(figure, title)


def _svg(figure: Figure, title: str) -> str:
    text = io.StringIO()
    figure.savefig(
        text,
        format="svg",
        transparent=True,
        metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
    )
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{escape(title)}"', 1
    )
