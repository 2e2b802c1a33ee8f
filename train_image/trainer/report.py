"""The report of a run: one HTML file with its curves, pictures and settings, readable without a network."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
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


STEEP = 20
"""A curve whose values differ by more than this factor is drawn over powers of ten."""

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


def chart(title: str, lines: list[Line], *, falls: bool = False) -> str:
    """An SVG with lines over epochs."""
    values = [y for line in lines for _, y in line.points]
    # What falls by factors would lie on the ground of an even scale, all but its start.
    is_steep = falls and min(values, default=0) > 0 and max(values) > STEEP * min(values)
    with rc_context(PLAIN):
        figure = Figure(figsize=(5.2, 2.7), layout="constrained")
        axes = figure.add_subplot(xlabel="epoch", yscale="log" if is_steep else "linear")
        for line in lines:
            marker = "o" if line.has_dots else ""
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            axes.plot(x, y, color=line.colour, label=line.name, marker=marker, markersize=3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not is_steep:
            axes.set_ylim(bottom=0)
        if len(lines) > 1:
            axes.legend()
        text = io.StringIO()
        figure.savefig(
            text,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{escape(title)}"', 1
    )
    return f'<figure class="chart"><figcaption><b>{escape(title)}</b></figcaption>{svg}</figure>'


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
.chart figcaption { margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; }
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
