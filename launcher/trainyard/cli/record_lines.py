"""Records of a run as one line of text: progress, summary, and lines of the driver's log."""

from __future__ import annotations

from typing import Any

from trainyard_trainer.config.training.metric import VALIDATION_PREFIX, is_validation
from trainyard_trainer.run_files.driver_output import PROGRESS, SUMMARY, record_of

Object = dict[str, Any]


def clock_text(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours if there are any: `75.3` is `1:15`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_text(progress: Object) -> str:
    """Return a progress record as one line: epoch, step, loss, a metric, speed and time left."""
    if "reports" in progress:  # user code
        return _reported_text(progress)
    parts = [
        *_how_far(progress),
        _figure("loss", progress["loss"], ".4f"),
        *_how_well(progress),
        _speed_text(progress),
    ]
    if "goodput" in progress:
        parts.append(f"goodput {progress['goodput']:.0%}")
    if progress["eta_s"] is not None:
        parts.append(f"ETA {clock_text(progress['eta_s'])}")
    if progress.get("attempt", 1) > 1:
        parts.append(f"attempt {progress['attempt']}")
    parts += [slow_worker_text(worker) for worker in progress.get("slow_workers", [])]
    return "  ".join(parts)


def slow_worker_text(worker: Object) -> str:
    """Return which worker is slow, where it runs and how slow it is."""
    return (
        f"slow: worker {worker['rank']} on {worker['node']}, {worker['step_s']:.2g} s per step "
        f"(median {worker['median_s']:.2g} s)"
    )


def _how_well(progress: Object) -> list[str]:
    """Return the recipe's first metric, in training and validation, or in the latter alone."""
    metric = next(filter(is_validation, progress), None)
    if metric is None:
        return []
    name = metric.removeprefix(VALIDATION_PREFIX)
    words = name.replace("_", " ")
    if name not in progress:
        return [_figure(f"validation {words}", progress[metric], "#.3g")]
    return [
        _figure(words, progress[name], "#.3g"),
        _figure("validation", progress[metric], "#.3g"),
    ]


def _figure(name: str, value: float | None, form: str) -> str:
    return f"{name} -" if value is None else f"{name} {value:{form}}"


def _how_far(progress: Object) -> list[str]:
    done = f"{progress['epoch']}/{progress['epochs']}"
    if "rows_per_s" in progress:  # trees, of which a round sees each row once
        return [f"round {done}"]
    return [f"epoch {done}", f"step {progress['step']}/{progress['steps']}"]


def _speed_text(record: Object) -> str:
    """Return the speed in the units of the recipe."""
    if "rows_per_s" in record:
        return f"{record['rows_per_s']:,.0f} rows/s"
    if "tokens_per_s" in record:
        return f"{record['tokens_per_s']:,.0f} tokens/s"
    return f"{record['samples_per_s']:.0f} samples/s"


def _reported_text(progress: Object) -> str:
    parts = [f"report {progress['reports']}", *_metrics(progress["metrics"])]
    if progress["attempt"] > 1:
        parts.append(f"attempt {progress['attempt']}")
    return "  ".join(parts)


def _metrics(metrics: Object) -> list[str]:
    return [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
    ]


def with_percent(progress: Object) -> str:
    """Return a progress record as one line that begins with the percentage, if it is known."""
    percent = f"{progress['percent']:3.0f}%  " if "percent" in progress else ""
    return percent + progress_text(progress)


def summary_text(summary: Object) -> str:
    """Return a summary record as one line: outcome, metrics, and the paths of the results."""
    if summary["outcome"] != "succeeded":
        return f"{summary['outcome']}: {summary['error']}"
    if "program" in summary:
        reported = ", ".join(_metrics(summary["metrics"]))
        return (
            f"succeeded: {summary['program']} ended well after {clock_text(summary['run_s'])}"
            f"{f' ({reported})' if reported else ''}; folder {summary['folder']}"
        )
    resumed = f", resumed from {summary['resumed_from']}" if summary["resumed_from"] else ""
    unit = "rounds" if "rounds" in summary else "epochs"
    metric = next(name for name in summary if is_validation(name))
    words = metric.removeprefix(VALIDATION_PREFIX).replace("_", " ")
    result = _figure(f"validation {words}", summary[metric], "#.4g")
    return (
        f"succeeded: {result} after {summary['epochs']} {unit} "
        f"in {clock_text(summary['train_s'])} ({_speed_text(summary)}{_goodput_text(summary)}{resumed}); "
        f"model {summary['model']}, metrics {summary['metrics']}, "
        f"report {summary['report']}"
    )


def _goodput_text(summary: Object) -> str:
    """Return the share of the run's time that went into steps that were kept; older images tell none."""
    goodput = summary.get("goodput")
    return f", goodput {goodput['share']:.0%}" if goodput else ""


def log_line(line: str) -> str:
    """Return a line of the driver's log for people: a record becomes text, other lines stay."""
    if (progress := record_of(line, PROGRESS)) is not None:
        return with_percent(progress)
    if (summary := record_of(line, SUMMARY)) is not None:
        return summary_text(summary)
    return line
