"""How far a run has come: the numbers, and the files that show them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """How long a run is."""

    epochs: int
    steps_per_epoch: int
    global_batch_size: int

    @classmethod
    def of(cls, config: TrainerConfig, num_train: int) -> Length:
        """What does not fill a global batch is left out of its epoch. Raises ConfigError."""
        size = config.train.global_batch_size
        if num_train < size:
            raise ConfigError(
                f"train.global_batch_size = {size} is more than the {num_train} training samples: "
                "no step can be made. Use a smaller one."
            )
        return cls(
            epochs=config.train.epochs, steps_per_epoch=num_train // size, global_batch_size=size
        )

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def samples(self) -> int:
        return self.steps * self.global_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What has been trained, over all attempts; lies in each checkpoint."""

    epoch: int = 0
    """Epochs that are complete."""
    step: int = 0
    samples: int = 0
    train_s: float = 0.0
    """Seconds from the first step on, with validation and checkpoints; lost work is not counted."""
    step_s: float = 0.0
    """Seconds of training steps alone."""
    loss: float | None = None
    accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None

    @property
    def images_per_s(self) -> float:
        return per_second(self.samples, self.step_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the loop tells about every second, and at the end of each epoch."""

    kind: Literal["interval", "epoch"]
    """An interval has rank 0's share of the batches since the last report, an epoch has them all."""
    epoch: int
    """The one under way, from 1."""
    step: int
    samples: int
    loss: float | None
    accuracy: float | None
    """Since the epoch began."""
    learning_rate: float
    images_per_s: float
    """Of all workers together."""
    eta_s: float | None
    val_loss: float | None
    """Of the last validation, as is `val_accuracy`."""
    val_accuracy: float | None


def per_second(count: float, seconds: float) -> float:
    """A rate that is 0 while no time has passed."""
    return count / seconds if seconds > 0 else 0.0


def percent(samples: int, total: int) -> float:
    return round(100 * min(samples / total, 1.0), 1) if total else 100.0


def eta_s(total: int, samples: int, samples_at_start: int, elapsed_s: float) -> float:
    """Seconds still to go at the pace of this attempt, its validations and checkpoints included."""
    done = samples - samples_at_start
    return max(total - samples, 0) * elapsed_s / done if done else 0.0


def cleaned(record: dict[str, Any]) -> dict[str, Any]:
    """Floats with as many digits as mean anything; None for NaN, which is no JSON."""

    def clean(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 6) if math.isfinite(value) else None
        return value

    return {key: clean(value) for key, value in record.items()}


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(cleaned(record))


def read_lines(folder: RunFolder, path: str) -> list[dict[str, Any]]:
    """The records of a file with one JSON object per line, without a last line that was cut off."""
    if not folder.exists(path):
        return []
    records = []
    for line in folder.read(path).decode(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Recorder:
    """Writes reports to metrics.jsonl and progress.json. Rank 0 has one."""

    def __init__(self, folder: RunFolder, length: Length, *, attempt: int, workers: int) -> None:
        self.folder = folder
        self.length = length
        self.attempt = attempt
        self.workers = workers
        self.pending: list[str] = []
        self.flushed = time.monotonic()

    def __call__(self, report: Report) -> None:
        record = asdict(report) | {"attempt": self.attempt}
        if report.kind == "interval":
            del record["val_loss"], record["val_accuracy"]
        self.pending.append(to_json(record) + "\n")
        # An epoch is written at once: its line must be there before its checkpoint is.
        is_due = time.monotonic() - self.flushed >= self.folder.flush_interval_s
        if is_due or report.kind == "epoch":
            self.folder.append(self.folder.metrics, "".join(self.pending))
            self.pending, self.flushed = [], time.monotonic()
        self.show(report)

    def show(self, report: Report) -> None:
        """Write progress.json alone."""
        record = {
            "percent": percent(report.samples, self.length.samples),
            "eta_s": report.eta_s,
            "epoch": report.epoch,
            "epochs": self.length.epochs,
            "step": report.step,
            "steps": self.length.steps,
            "samples": report.samples,
            "loss": report.loss,
            "accuracy": report.accuracy,
            "val_accuracy": report.val_accuracy,
            "images_per_s": report.images_per_s,
            "attempt": self.attempt,
            "workers": self.workers,
        }
        self.folder.write(self.folder.progress, to_json(record), is_durable=False)

    def show_start(self, trained: Trained) -> None:
        """Write progress.json as it stands before the first step of an attempt."""
        self.show(
            Report(
                kind="interval",
                epoch=min(trained.epoch + 1, self.length.epochs),
                step=trained.step,
                samples=trained.samples,
                loss=trained.loss,
                accuracy=trained.accuracy,
                learning_rate=0.0,
                images_per_s=trained.images_per_s,
                eta_s=None,
                val_loss=trained.val_loss,
                val_accuracy=trained.val_accuracy,
            )
        )
