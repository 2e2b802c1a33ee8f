"""The table of all metrics of a run: each name, unit and meaning stands here once.

From this table follow the Prometheus gauges, the TensorBoard curves, the charts of the report, the metrics in
progress.json, and the list of metrics in the documentation. To add a metric, add an entry to ENGINE_METRICS
and record a value of that name: as a field of `progress.MetricsRecord`, or in the speeds that a recipe
computes. A recipe declares its own metrics itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from trainyard_trainer.config.training.metric import LOSS, RATIO, VALIDATION_PREFIX, Metric
from trainyard_trainer.config.training.recipes import BUILT_IN_METRICS

Kind = Literal["interval", "epoch"]
"""The kinds of lines in metrics.jsonl: about one per second, and one at the end of each epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge:
    """A Prometheus gauge of a metric. Ray adds the prefix `ray_` when it exports the gauge."""

    name: str
    """The gauge's name, which ends with its base unit."""
    scale: float = 1.0
    """The recorded value is multiplied by this factor to get the gauge's base unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The curve of a metric on a chart of the report. Curves with the same chart title share a chart."""

    chart: str
    """The title of the chart."""
    label: str
    """The name of the curve in the chart's legend."""
    scale: float = 1.0
    """The recorded value is multiplied by this factor before it is drawn."""
    is_quality: bool = False
    """Whether the metric tells how good the model is: drawn once per epoch, with the best epoch marked."""
    is_log: bool = False
    """Whether the chart has a logarithmic axis when its values differ by a large factor."""
    replaces: str | None = None
    """The metric whose curve is left out where this one was recorded: the same speed in another unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetric:
    """A number that a run records while it trains."""

    name: str
    """The key in metrics.jsonl and progress.json."""
    unit: str
    """The unit of the recorded value."""
    description: str
    """One sentence for the documentation and for Prometheus."""
    direction: Literal["higher", "lower"] | None = None
    """Which values are better; None if neither is."""
    gauge: Gauge | None = None
    """The Prometheus gauge, if there is one."""
    tags: Mapping[Kind, str] = field(default_factory=dict)
    """The TensorBoard tag for each kind of line in metrics.jsonl from which the curve is drawn."""
    curve: Curve | None = None
    """The curve in the report, if there is one."""
    is_progress: bool = False
    """Whether progress.json holds the metric, beside metrics.jsonl."""


def _both(tag: str) -> dict[Kind, str]:
    """Use the same TensorBoard tag for the lines of intervals and of epochs."""
    return {"interval": tag, "epoch": tag}


GAUGE_LABELS = ("run", "attempt")
"""The labels of each Prometheus gauge."""

STEP_AGE = Gauge(name="trainyard_step_age_seconds")
"""The gauge that the driver publishes, beside the gauges of metrics."""

STEP_AGE_MEANING = "Seconds since the driver saw the newest step of this attempt."

SLOW_WORKER = Gauge(name="trainyard_slow_worker_step_seconds")
"""The gauge of each worker that is slow, with further labels."""

SLOW_WORKER_LABELS = (*GAUGE_LABELS, "rank", "node")

SLOW_WORKER_MEANING = "Seconds per step of a worker that needs at least twice the median of all."

ENGINE_METRICS = (
    RunMetric(
        name="percent",
        unit="%",
        description="Share of the run's training samples that are done.",
        gauge=Gauge(name="trainyard_progress_ratio", scale=0.01),
        is_progress=True,
    ),
    RunMetric(
        name="eta_s",
        unit="s",
        description="Estimated time until the end of the run.",
        direction="lower",
        gauge=Gauge(name="trainyard_eta_seconds"),
        is_progress=True,
    ),
    RunMetric(
        name="epoch",
        unit="epochs",
        description="The current epoch, counted from 1; a round in gradient boosting.",
        gauge=Gauge(name="trainyard_epoch"),
        is_progress=True,
    ),
    RunMetric(
        name="step",
        unit="steps",
        description="Optimizer steps done, over all attempts.",
        gauge=Gauge(name="trainyard_step"),
        is_progress=True,
    ),
    RunMetric(
        name="samples",
        unit="samples",
        description="Training samples done, over all attempts.",
        gauge=Gauge(name="trainyard_samples"),
        is_progress=True,
    ),
    RunMetric(
        name="loss",
        unit="loss of the recipe",
        description="Training loss: since the last interval line, or over the whole epoch.",
        direction="lower",
        gauge=Gauge(name="trainyard_loss"),
        # Means over an epoch have a tag of their own: among the intervals they would look like noise.
        tags={"interval": "train/loss", "epoch": "epoch/loss"},
        curve=Curve(chart="Loss", label="training", is_quality=True, is_log=True),
        is_progress=True,
    ),
    RunMetric(
        name="val_loss",
        unit="loss of the recipe",
        description="Validation loss of the last complete validation.",
        direction="lower",
        gauge=Gauge(name="trainyard_validation_loss"),
        tags={"epoch": "val/loss"},
        curve=Curve(chart="Loss", label="validation", is_quality=True, is_log=True),
    ),
    RunMetric(
        name="learning_rate",
        unit="",
        description="Learning rate of the last step.",
        gauge=Gauge(name="trainyard_learning_rate"),
        tags=_both("train/learning_rate"),
        curve=Curve(chart="Learning rate", label="learning rate"),
    ),
    RunMetric(
        name="samples_per_s",
        unit="samples/s",
        description="Training samples per second, of all workers together.",
        direction="higher",
        gauge=Gauge(name="trainyard_samples_per_second"),
        tags=_both("speed/samples_per_s"),
        curve=Curve(chart="Samples per second", label="samples per second"),
        is_progress=True,
    ),
    RunMetric(
        name="rows_per_s",
        unit="rows/s",
        description="Training rows per second of gradient boosting, of all workers together.",
        direction="higher",
        tags=_both("speed/rows_per_s"),
        curve=Curve(chart="Rows per second", label="rows per second", replaces="samples_per_s"),
        is_progress=True,
    ),
    RunMetric(
        name="tokens_per_s",
        unit="tokens/s",
        description="Training tokens per second of a language model, of all workers together.",
        direction="higher",
        tags=_both("speed/tokens_per_s"),
        curve=Curve(chart="Tokens per second", label="tokens per second", replaces="samples_per_s"),
        is_progress=True,
    ),
    RunMetric(
        name="mfu",
        unit="0 to 1",
        description="Model FLOPs utilization: the share of the GPUs' peak that the model's arithmetic uses.",
        direction="higher",
        tags=_both("speed/mfu"),
        curve=Curve(chart="Model FLOPs utilization, %", label="MFU", scale=100),
        is_progress=True,
    ),
    RunMetric(
        name="step_s",
        unit="s",
        description="Seconds per step of rank 0, without the wait for its batch.",
        direction="lower",
        gauge=Gauge(name="trainyard_step_seconds"),
        tags=_both("speed/step_s"),
        curve=Curve(chart="Milliseconds per step", label="step", scale=1000),
    ),
    RunMetric(
        name="data_wait_s",
        unit="s",
        description="Seconds per step that rank 0 waited for its batch.",
        direction="lower",
        gauge=Gauge(name="trainyard_data_wait_seconds"),
        tags=_both("speed/data_wait_s"),
        curve=Curve(chart="Milliseconds per step", label="wait for its batch", scale=1000),
    ),
    RunMetric(
        name="checkpoint_stall_s",
        unit="s",
        description="Seconds that training waited for checkpoints since the line before.",
        direction="lower",
        gauge=Gauge(name="trainyard_checkpoint_stall_seconds"),
        tags=_both("speed/checkpoint_stall_s"),
    ),
    RunMetric(
        name="memory_bytes",
        unit="bytes",
        description="Peak memory of rank 0: of its GPU if it has one, else of its process.",
        direction="lower",
        gauge=Gauge(name="trainyard_memory_bytes"),
        tags=_both("speed/memory_bytes"),
        curve=Curve(chart="Memory, MiB", label="memory", scale=2**-20),
    ),
    RunMetric(
        name="loop_s",
        unit="s",
        description="Seconds of rank 0 in the training loop so far; those of lost steps are not counted.",
        is_progress=True,
    ),
    RunMetric(
        name="goodput",
        unit="0 to 1",
        description="Share of the workers' time so far that went into steps which were not lost.",
        direction="higher",
        gauge=Gauge(name="trainyard_goodput_ratio"),
        tags=_both("speed/goodput"),
        is_progress=True,
    ),
    RunMetric(
        name="workers",
        unit="workers",
        description="Workers of the current attempt.",
        gauge=Gauge(name="trainyard_workers"),
        is_progress=True,
    ),
)
"""The metrics of every run, in the order in which charts and documentation show them."""


def rows_of(metric: Metric) -> tuple[RunMetric, ...]:
    """Return the rows of a recipe's metric: of training, if it has values there, and of validation."""
    title = metric.title or metric.name.replace("_", " ").capitalize()
    unit = "_ratio" if metric.unit == RATIO else ""
    is_log = metric.direction == "lower"
    rows = (
        RunMetric(
            name=metric.name,
            unit=metric.unit,
            description=f"Training, since the epoch began: {metric.description}.",
            direction=metric.direction,
            gauge=Gauge(name=f"trainyard_{metric.name}{unit}"),
            tags={"interval": f"train/{metric.name}", "epoch": f"epoch/{metric.name}"},
            curve=Curve(chart=title, label="training", is_quality=True, is_log=is_log),
            is_progress=True,
        ),
        RunMetric(
            name=f"{VALIDATION_PREFIX}{metric.name}",
            unit=metric.unit,
            description=f"Last complete validation: {metric.description}.",
            direction=metric.direction,
            gauge=Gauge(name=f"trainyard_validation_{metric.name}{unit}"),
            tags={"epoch": f"val/{metric.name}"},
            curve=Curve(chart=title, label="validation", is_quality=True, is_log=is_log),
            is_progress=True,
        ),
    )
    return rows[1:] if metric.is_validation_only else rows


def run_metrics(metrics: Sequence[Metric]) -> tuple[RunMetric, ...]:
    """Return all metrics of a run whose recipe has these metrics: they follow the loss."""
    names = [metric.name for metric in ENGINE_METRICS]
    place = names.index(f"{VALIDATION_PREFIX}{LOSS}") + 1
    own = chain.from_iterable(map(rows_of, metrics))
    return (*ENGINE_METRICS[:place], *own, *ENGINE_METRICS[place:])


METRICS = run_metrics(BUILT_IN_METRICS)
"""The metrics of all built-in recipes."""


def quality_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Select what a line of metrics.jsonl tells of the model: its loss and the metrics of its recipe."""
    quality = {metric.name for metric in ENGINE_METRICS if metric.curve and metric.curve.is_quality}
    others = {metric.name for metric in ENGINE_METRICS} - quality | {"kind", "attempt"}
    return {name: value for name, value in record.items() if name not in others}


INTRODUCTION = """\
# Metrics

A run writes these metrics to `metrics.jsonl` in its folder, about once a second and at the end of each
epoch. Those marked in the column *progress* are also in `progress.json`. Gauges have the labels `run` and
`attempt`. A TensorBoard tag in brackets belongs to the values of whole epochs.

The metrics of the built-in recipes are among them. A recipe can have others: each is recorded by its name
and with `val_` before it, and has a gauge, a curve and a chart too.

`make golden` writes this page from `train_image/trainyard_trainer/run_folder/measurements/metrics.py`.

| metric | unit | better | meaning | progress | Prometheus gauge | TensorBoard tag | report's chart |
|---|---|---|---|---|---|---|---|"""
"""The beginning of the documentation's list of metrics."""


def gauge_values(
    record: Mapping[str, Any], metrics: Iterable[RunMetric] = METRICS
) -> dict[str, float]:
    """Convert a record of progress.json or metrics.jsonl to gauge values, by the names of the gauges.

    A metric that the record lacks, or for which it holds None, is left out.
    """
    return {
        metric.gauge.name: record[metric.name] * metric.gauge.scale
        for metric in metrics
        if metric.gauge and record.get(metric.name) is not None
    }


def tensorboard_values(
    record: Mapping[str, Any], metrics: Iterable[RunMetric] = METRICS
) -> dict[str, float]:
    """Select what TensorBoard shows of a line of metrics.jsonl: values by tag.

    A metric that the line lacks, or for which it holds None, is left out.
    """
    return {
        metric.tags[record["kind"]]: record[metric.name]
        for metric in metrics
        if record["kind"] in metric.tags and record.get(metric.name) is not None
    }


def metrics_page(metrics: Iterable[RunMetric] = METRICS) -> str:
    """Render docs/reference/metrics.md, the list of metrics; `make golden` writes it."""
    return "\n".join([*_page_lines(metrics), ""])


STEP_AGE_SECTION = f"""
## Time since the last step

`ray_{STEP_AGE.name}`: {STEP_AGE_MEANING} The driver publishes this gauge, also while
workers hang or are being replaced. It begins with the first step of an attempt, and ends with the attempt."""
"""A part of the documentation's list of metrics."""

SLOW_WORKER_SECTION = f"""
## Slow workers

`ray_{SLOW_WORKER.name}`: {SLOW_WORKER_MEANING} Beside `run` and `attempt` it has the labels `rank` and
`node`, and it is there only while a worker is slow. See
[Find a slow worker](../guides/runs.md#find-a-slow-worker)."""
"""The end of the documentation's list of metrics."""


def _page_lines(metrics: Iterable[RunMetric]) -> Iterator[str]:
    yield INTRODUCTION
    for metric in metrics:
        interval, epoch = metric.tags.get("interval"), metric.tags.get("epoch")
        tags = [f"`{interval}`"] if interval else []
        tags += [f"(`{epoch}`)"] if epoch and epoch != interval else []
        cells = (
            f"`{metric.name}`",
            metric.unit,
            metric.direction or "",
            metric.description,
            "yes" if metric.is_progress else "",
            f"`ray_{metric.gauge.name}`" if metric.gauge else "",
            " ".join(tags),
            metric.curve.chart if metric.curve else "",
        )
        yield f"| {' | '.join(cells)} |"
    yield STEP_AGE_SECTION
    yield SLOW_WORKER_SECTION
