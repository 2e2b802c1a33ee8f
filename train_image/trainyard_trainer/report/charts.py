"""The curves of a run as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREY = "#2563eb", "#d9640b", "#8b97a6"

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
    """Lines over epochs."""

    title: str
    lines: Sequence[Line]
    falls: bool = False
    """By factors, as a loss does: an even scale would show all but its start on the ground."""
    best_epoch: int | None = None
    unit: str = "epoch"
    """Of what goes to the right."""


class Metrics:
    """Records of metrics.jsonl, to be drawn over epochs."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.epochs = [record for record in records if record["kind"] == "epoch"]

    def points(self, key: str, *, scale: float = 1.0) -> Points:
        """Of all records that have a value."""
        return thinned(self._points(self.records, key, scale))

    def epoch_points(self, key: str) -> Points:
        """Of whole epochs alone."""
        return thinned(self._points(self.epochs, key, 1.0))

    def _points(self, records: list[dict[str, Any]], key: str, scale: float) -> Points:
        steps_per_epoch = self.epochs[0]["step"] / self.epochs[0]["epoch"]
        return [
            (record["step"] / steps_per_epoch, record[key] * scale)
            for record in records
            if record[key] is not None
        ]


def curves(metrics: Metrics, best_epoch: int | None, speed: tuple[str, str]) -> Iterator[Chart]:
    """What was learnt; how fast, and with how much memory. Nothing before the first epoch ends.

    `speed` is a title, and a key in metrics.jsonl.
    """
    if not metrics.epochs:
        return
    for title, key in (("Loss", "loss"), ("Accuracy", "accuracy")):
        yield Chart(
            title=title,
            lines=[
                Line(name=name, colour=colour, points=metrics.epoch_points(of), has_dots=True)
                for name, colour, of in (
                    ("training", BLUE, key),
                    ("validation", ORANGE, f"val_{key}"),
                )
            ],
            falls=key == "loss",
            best_epoch=best_epoch,
        )
    yield _single("Learning rate", metrics.points("learning_rate"))
    title, key = speed
    yield _single(title, metrics.points(key))
    yield Chart(
        title="Milliseconds per step",
        lines=[
            Line(name=name, colour=colour, points=metrics.points(key, scale=1000))
            for name, colour, key in (
                ("step", BLUE, "step_s"),
                ("wait for its batch", ORANGE, "data_wait_s"),
            )
        ],
    )
    yield _single("Memory, MiB", metrics.points("memory_bytes", scale=2**-20))


def _single(title: str, points: Points) -> Chart:
    return Chart(title=title, lines=[Line(name=title, colour=BLUE, points=points)])


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
    """The chart as SVG."""
    values = [y for line in chart.lines for _, y in line.points]
    is_steep = chart.falls and min(values, default=0) > 0 and max(values) > STEEP * min(values)
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
