"""The report of a run: one HTML file with its curves, pictures and settings, readable without a network."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.config import TrainerConfig
from trainer.data.parquet import Images
from trainer.data.torch_loader import ParquetImages
from trainer.folder import RunFolder
from trainer.model import build_model, to_input
from trainer.progress import read_lines

BLUE, ORANGE = "#2563eb", "#d9640b"
NUM_PREDICTIONS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the final model says of one validation image."""

    pixels: np.ndarray
    """(C, H, W) uint8."""
    label: str
    predicted: str
    confidence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve of a chart."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    has_dots: bool = False


def write_report(
    folder: RunFolder, config: TrainerConfig, images: Images, summary: dict[str, Any]
) -> None:
    """Make report.html of what lies in the run's folder."""
    page = render(
        config,
        summary,
        metrics=read_lines(folder, folder.metrics),
        attempts=read_lines(folder, folder.attempts),
        predictions=predict(folder, config, images),
    )
    folder.write(folder.report, page)


def predict(folder: RunFolder, config: TrainerConfig, images: Images) -> list[Prediction]:
    """The final model's answers for a few validation images, of as many classes as there are."""
    data = ParquetImages(folder, folder.valid_data, images)
    chosen = varied(data.labels.tolist(), NUM_PREDICTIONS)
    pixels, labels = data[np.array(chosen)]
    model = build_model(config.train.model).eval()
    weights = io.BytesIO(folder.read(folder.model))
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    with torch.inference_mode():
        shares = model(to_input(pixels, images, config.train.model.image_size)).softmax(dim=1)
    confidence, predicted = shares.max(dim=1)
    return [
        Prediction(
            pixels=image,
            label=images.classes[label],
            predicted=images.classes[said],
            confidence=sure,
        )
        for image, label, said, sure in zip(
            pixels.numpy(), labels.tolist(), predicted.tolist(), confidence.tolist(), strict=True
        )
    ]


def varied(labels: Iterable[int], count: int) -> list[int]:
    """Indices of the first of each class, then of the second of each, and so on."""
    seen: Counter[int] = Counter()
    rounds = []
    for index, label in enumerate(labels):
        rounds.append((seen[label], index))
        seen[label] += 1
    return [index for _, index in sorted(rounds)[:count]]


# The page.


def render(
    config: TrainerConfig,
    summary: dict[str, Any],
    *,
    metrics: list[dict[str, Any]],
    attempts: list[dict[str, Any]],
    predictions: list[Prediction],
) -> str:
    """The whole page as text."""
    train, scaling = config.train, config.scaling
    device = "GPU" if scaling.use_gpu else "CPU"
    subtitle = (
        f"{train.model.name} on {config.data.source}, {train.epochs} epochs, "
        f"{scaling.num_workers} {device} worker{'s' if scaling.num_workers > 1 else ''}"
    )
    headline = (
        ("validation accuracy", f"{summary['val_accuracy']:.2%}"),
        ("training time", duration(summary["train_s"])),
        ("images per second", f"{summary['images_per_s']:,.0f}"),
        ("images seen", f"{summary['samples_seen']:,}"),
        ("attempt" if summary["attempts"] == 1 else "attempts", str(summary["attempts"])),
    )
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in headline
    )
    charts = "".join(chart(title, lines, falls=title == "Loss") for title, lines in curves(metrics))
    pictures = "".join(picture(prediction) for prediction in predictions)
    settings = table(("setting", "value"), flat(config.model_dump(mode="json")))
    history = table(
        ("attempt", "started", "from checkpoint", "versions"),
        [
            (
                str(line["attempt"]),
                line["time"],
                line["resumed_from"] or "start",
                ", ".join(f"{name} {version}" for name, version in line["versions"].items()),
            )
            for line in attempts
        ],
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(config.name)} - trainyard</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{escape(config.name)}</h1><p>{escape(subtitle)}</p></header>
<section class="tiles">{tiles}</section>
<section><h2>Curves</h2><div class="charts">{charts}</div></section>
<section><h2>Predictions on validation images</h2><div class="pictures">{pictures}</div></section>
<section><h2>Attempts</h2>{history}</section>
<section><h2>Settings</h2>{settings}</section>
</main>
</body>
</html>
"""


def curves(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, list[Line]]]:
    """Titles and lines of the charts, over epochs."""
    epochs = [record for record in metrics if record["kind"] == "epoch"]
    if not epochs:
        return
    steps_per_epoch = epochs[0]["step"] / epochs[0]["epoch"]

    def points(records: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
        return [
            (record["step"] / steps_per_epoch, record[key])
            for record in records
            if record[key] is not None
        ]

    for title, key in (("Loss", "loss"), ("Accuracy", "accuracy")):
        yield (
            title,
            [
                Line(name="training", colour=BLUE, points=points(epochs, key), has_dots=True),
                Line(
                    name="validation",
                    colour=ORANGE,
                    points=points(epochs, f"val_{key}"),
                    has_dots=True,
                ),
            ],
        )
    for title, key in (("Images per second", "images_per_s"), ("Learning rate", "learning_rate")):
        yield title, [Line(name=title.lower(), colour=BLUE, points=points(metrics, key))]


def picture(prediction: Prediction) -> str:
    is_right = prediction.label == prediction.predicted
    channels = prediction.pixels.transpose(1, 2, 0)
    # One channel is grey, three are colour; of any other number the first is shown.
    image = Image.fromarray(channels if channels.shape[2] == 3 else channels[:, :, 0])
    data = io.BytesIO()
    image.save(data, "PNG")
    source = base64.b64encode(data.getvalue()).decode()
    return (
        f'<figure class="{"right" if is_right else "wrong"}">'
        f'<img alt="{escape(prediction.label)}" src="data:image/png;base64,{source}">'
        f"<figcaption><dl><dt>label</dt><dd>{escape(prediction.label)}</dd>"
        f"<dt>predicted</dt><dd>{escape(prediction.predicted)} "
        f"<i>{'✓' if is_right else '✗'}</i></dd>"
        f"<dt>confidence</dt><dd>{prediction.confidence:.1%}</dd></dl>"
        f'<div class="bar"><div style="width:{prediction.confidence:.1%}"></div></div>'
        "</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def flat(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `train.model.name`, value."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value if isinstance(value, str) else json.dumps(value)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


# A chart, drawn by hand: a handful of lines needs no plotting library in the image.

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 30

STEEP = 20
"""A curve whose values differ by more than this factor is drawn over powers of ten."""


def chart(title: str, lines: list[Line], *, falls: bool = False) -> str:
    """An SVG with lines over epochs."""
    values = [y for line in lines for _, y in line.points]
    right = max((x for line in lines for x, _ in line.points), default=1.0)
    # What falls by factors would lie on the ground of an even scale, all but its start.
    is_steep = falls and min(values, default=0) > 0 and max(values) > STEEP * min(values)
    y_ticks = (
        decades(min(values), max(values)) if is_steep else ticks(0.0, max(values, default=1.0))
    )
    scale = math.log10 if is_steep else float
    bottom, top = scale(y_ticks[0]), scale(y_ticks[-1])
    x_ticks = [x for x in ticks(0.0, right, most=8) if x <= right and x == int(x)]

    def at_x(x: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * x / right, 1)

    def at_y(y: float) -> float:
        height = (scale(y) - bottom) / (top - bottom)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * height, 1)

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y)}" y2="{at_y(y)}"/>'
        f'<text class="y" x="{LEFT - 8}" y="{at_y(y) + 4}">{y:,.6g}</text>'
        for y in y_ticks
    ]
    parts += [
        f'<text class="x" x="{at_x(x)}" y="{HEIGHT - BOTTOM + 18}">{x:g}</text>' for x in x_ticks
    ]
    for line in lines:
        path = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" stroke="{line.colour}"/>')
        if line.has_dots:
            parts += [
                f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="3" fill="{line.colour}">'
                f"<title>epoch {x:g}: {line.name} {y:.4g}</title></circle>"
                for x, y in line.points
            ]
    legend = "".join(
        f'<span><i style="background:{line.colour}"></i>{escape(line.name)}</span>'
        for line in lines
        if len(lines) > 1
    )
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over epochs">'
        f"{''.join(parts)}</svg></figure>"
    )


def decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose both: 0.03, 2 -> 0.01, 0.1, 1, 10."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"1e{power}") for power in powers]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values that enclose both: 0, 0.7 -> 0, 0.2, 0.4, 0.6, 0.8."""
    if high <= low:
        high = low + 1
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


STYLE = """
:root { color-scheme: light; --ink: #16202e; --soft: #5b6776; --rule: #e3e7ec; --paper: #f5f6f8; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { margin: 0; font-size: 30px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
header p { margin: 2px 0 0; color: var(--soft); font-size: 16px; }
h2 { margin: 40px 0 14px; font-size: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 14px;
  margin-top: 26px; }
.tile, .chart, .pictures figure, table { background: #fff; border: 1px solid var(--rule);
  border-radius: 10px; }
.tile { padding: 16px 18px; }
.tile b { display: block; font-size: 26px; font-weight: 650; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.tile:first-child { background: var(--ink); border-color: var(--ink); color: #fff; }
.tile:first-child span { color: #c3ccd8; }
figure { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr));
  gap: 14px; }
.chart { padding: 14px 16px 8px; }
.chart figcaption { display: flex; gap: 16px; align-items: baseline; margin-bottom: 6px; }
.chart figcaption b { margin-right: auto; }
.chart figcaption span { color: var(--soft); font-size: 13px; }
.chart figcaption i { display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  margin-right: 6px; vertical-align: middle; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.y { text-anchor: end; }
svg text.x { text-anchor: middle; }
svg .grid { stroke: var(--rule); }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.pictures { display: grid; grid-template-columns: repeat(3, 1fr); gap: 14px; }
.pictures figure { display: flex; gap: 14px; padding: 14px; align-items: center; }
.pictures img { width: 112px; height: 112px; object-fit: contain; background: #000; border-radius: 6px;
  image-rendering: pixelated; flex: none; }
.pictures figcaption { flex: 1; min-width: 0; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 0 10px; margin: 0; font-size: 13px; }
dt { color: var(--soft); }
dd { margin: 0; font-weight: 600; text-align: right; overflow-wrap: anywhere; }
dd i { font-style: normal; }
.bar { height: 4px; margin-top: 8px; border-radius: 2px; background: var(--rule); overflow: hidden; }
.bar div { height: 100%; background: #15803d; }
.right i { color: #15803d; }
.wrong i { color: #b42318; }
.wrong .bar div { background: #b42318; }
.pictures .wrong { border-color: #b42318; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 14px; }
th, td { padding: 7px 16px; text-align: left; vertical-align: top; overflow-wrap: anywhere;
  border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
tr:last-child td { border-bottom: 0; }
td:first-child { white-space: nowrap; }
td { font-variant-numeric: tabular-nums; }
@media (max-width: 720px) {
  .pictures { grid-template-columns: 1fr; }
  td:first-child { white-space: normal; }
}
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""
