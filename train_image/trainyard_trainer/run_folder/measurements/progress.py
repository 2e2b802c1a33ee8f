"""The progress of a run in numbers, and the files in which these are recorded."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig
from trainyard_trainer.config.training.metric import LOSS, Metric, is_validation
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.metrics import Kind, rows_of, run_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """How long a run is."""

    epochs: int
    num_samples: int
    """Of the training split."""
    global_batch_size: int
    drop_last: bool

    @classmethod
    def of(cls, config: TrainerConfig, num_train: int) -> Length:
        """Raises ConfigError if the samples do not fill one global batch."""
        size = config.train.global_batch_size
        if num_train < size:
            raise ConfigError(
                f"train.global_batch_size = {size} is more than the {num_train} training samples: "
                "no step can be made. Use a smaller one."
            )
        return cls(
            epochs=config.train.epochs,
            num_samples=num_train,
            global_batch_size=size,
            drop_last=config.data.drop_last,
        )

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def samples_per_epoch(self) -> int:
        return self.num_samples - self.dropped_per_epoch

    @property
    def dropped_per_epoch(self) -> int:
        """Samples that are left out because they do not fill a global batch."""
        return self.num_samples % self.global_batch_size if self.drop_last else 0

    def batch_size(self, step_in_epoch: int) -> int:
        """Samples of a global batch, counted from 0: the last one of an epoch may be smaller."""
        start = step_in_epoch * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - start)

    def samples_until(self, epochs: int, steps_in_epoch: int) -> int:
        """Samples of so many whole epochs and so many steps of the next one."""
        size = self.global_batch_size
        return epochs * self.samples_per_epoch + min(steps_in_epoch * size, self.samples_per_epoch)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def samples(self) -> int:
        return self.epochs * self.samples_per_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What has been trained, over all attempts; lies in each checkpoint."""

    epoch: int = 0
    """Epochs that are complete."""
    step: int = 0
    samples: int = 0
    steps_in_epoch: int = 0
    """Steps of the epoch under way; 0 between two epochs."""
    train_s: float = 0.0
    """Seconds from the first step on, with validation and checkpoints; lost work is not counted."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where rank 0's time went: keys of TIME_PHASES."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss and the recipe's metrics of the last complete epoch, in training and validation, by the names
    of metrics.jsonl."""
    best_stopping: float | None = None
    """The best value of `train.early_stopping.metric` so far."""
    epochs_without_gain: int = 0
    is_stopped_early: bool = False

    def is_complete(self, epochs: int) -> bool:
        """Whether nothing is left to train of so many epochs."""
        return self.is_stopped_early or (self.epoch >= epochs and self.steps_in_epoch == 0)

    @property
    def samples_per_s(self) -> float:
        """While steps were made: waiting for data counts, validation and checkpoints do not."""
        spent = (self.seconds.get(name, 0.0) for name in ("data", "compute", "communication"))
        return per_second(self.samples, sum(spent))


TIME_PHASES = ("startup", "data", "compute", "communication", "checkpoint", "validation")
"""Where time goes: start of an attempt to its first step, waiting for batches, the steps, what of their
gradients' exchange was not hidden behind them, waiting for checkpoints, validation."""


LOOP_PHASES = tuple(phase for phase in TIME_PHASES if phase != "startup")
"""The phases of the training loop."""


def loop_s(seconds: Mapping[str, float]) -> float:
    """Return the seconds in the training loop; `seconds` are those of each phase."""
    return sum(seconds.get(phase, 0.0) for phase in LOOP_PHASES)


def measured_phases(config: RecipeConfig) -> tuple[str, ...]:
    """The parts of TIME_PHASES that are measured: without DDP the exchange is part of the steps."""
    is_ddp = isinstance(config, TrainerConfig) and config.train.strategy == "ddp"
    return tuple(part for part in TIME_PHASES if is_ddp or part != "communication")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowWorker:
    """A worker that needed much longer for a step than the others: see `engine.measuring.slow_workers`."""

    rank: int
    node: str
    """The name of its node: the pod on Kubernetes."""
    step_s: float
    """Its mean seconds per step by itself: with the wait for its batch, without that for other workers."""
    median_s: float
    """The median of all workers."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the key `slow_workers` of a record."""
        return cleaned(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRecord:
    """One line of metrics.jsonl, written about every second and at the end of each epoch.

    The meaning and unit of each metric stand in `run_folder.metrics`; None means that it was not measured.
    """

    kind: Kind
    """An interval covers rank 0's share of the batches since the last line, an epoch covers all batches."""
    epoch: int
    step: int
    samples: int
    metrics: Mapping[str, float]
    """The loss and the recipe's metrics by name; those of the last validation begin with `val_`."""
    learning_rate: float = 0.0
    samples_per_s: float = 0.0
    eta_s: float | None = None
    data_wait_s: float | None = None
    step_s: float | None = None
    checkpoint_stall_s: float = 0.0
    memory_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where rank 0's time went up to this step, over all attempts: keys of TIME_PHASES."""
    slow_workers: tuple[SlowWorker, ...] = ()
    """Those that were slow in the last minute."""

    def flat(self) -> dict[str, Any]:
        """Return the values as metrics.jsonl has them, without those of an earlier validation."""
        values = asdict(self)
        metrics, seconds = values.pop("metrics"), values.pop("seconds")
        del values["slow_workers"]
        if self.kind == "interval":
            metrics = {name: value for name, value in metrics.items() if not is_validation(name)}
        return metrics | values | {"loop_s": loop_s(seconds)} | self.slow()

    def slow(self) -> dict[str, Any]:
        """Return the key `slow_workers` of a record; nothing if no worker is slow."""
        slow = [worker.to_json() for worker in self.slow_workers]
        return {"slow_workers": slow} if slow else {}


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
    """Return a record with rounded numbers, and with None for NaN and infinity, which JSON does not have.

    A number is rounded to 6 decimals; below 1 to 7 significant digits, which keep a learning rate of 1e-7.
    """

    def clean(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        if not math.isfinite(value):
            return None
        return round(value, 6) if abs(value) >= 1 else float(f"{value:.7g}")

    return {key: clean(value) for key, value in record.items()}


def to_json(record: dict[str, Any]) -> str:
    """Return the record as one line of JSON, without the line's end."""
    return json.dumps(cleaned(record))


def read_lines(folder: RunFolder, path: str) -> list[dict[str, Any]]:
    """Return the records of a file with one JSON object per line, without an incomplete last line."""
    if not folder.exists(path):
        return []
    return parsed(folder.read(path).decode(errors="replace"))


def parsed(lines: str) -> list[dict[str, Any]]:
    """Return the records of lines with one JSON object each, without an incomplete last line."""
    records = []
    for line in lines.splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """How far a run has come by its records, saved or not. It is recorded about once a second."""

    step: int
    loop_s: float
    """The seconds in the training loop up to that step."""

    @classmethod
    def by(cls, folder: RunFolder, trained: Trained = Trained()) -> Reached:
        """Read the records; the run has come at least as far as its newest checkpoint, `trained`."""
        records = read_lines(folder, folder.metrics)
        if folder.exists(folder.progress):
            records.append(json.loads(folder.read(folder.progress)))
        return cls(
            step=max([trained.step, *(each["step"] for each in records)]),
            # Records of older versions do not have it.
            loop_s=max([loop_s(trained.seconds), *(each.get("loop_s", 0.0) for each in records)]),
        )

    def to_json(self) -> dict[str, float]:
        """Return the keys of a line of attempts.jsonl and starts.jsonl."""
        return {"reached_step": self.step, "reached_loop_s": round(self.loop_s, 3)}


class Recorder:
    """Writes metrics to metrics.jsonl and progress.json in a thread of its own. Only rank 0 has one."""

    def __init__(
        self,
        folder: RunFolder,
        length: Length,
        *,
        attempt: int,
        workers: int,
        metrics: Sequence[Metric] = (),
        speeds: Callable[[float], dict[str, float]] = lambda samples_per_s: {},
        goodput: Callable[[Mapping[str, float]], float | None] = lambda seconds: None,
        on_record: Callable[[dict[str, Any]], None] = lambda record: None,
        check_fence: Callable[[], None] = lambda: None,
        unwritten: Path | None = None,
    ) -> None:
        """Create the recorder and start its thread.

        `metrics` are those of the recipe, and `speeds` computes its own units of speed from the samples per
        second. `goodput` tells the goodput up to a record by its `seconds`. `on_record` is called in the
        recorder's thread with each line and the contents of progress.json. `check_fence` raises if a newer
        worker group has taken over the run's folder. `unwritten` is a file of this machine that outlives the
        process, for lines that are not written yet.
        """
        self.folder = folder
        self.length = length
        self.attempt = attempt
        self.workers = workers
        self._speeds = speeds
        self._goodput = goodput
        self._of_recipe = [LOSS, *(row.name for each in metrics for row in rows_of(each))]
        self._shown = [metric.name for metric in run_metrics(metrics) if metric.is_progress]
        self._on_record = on_record
        self._check_fence = check_fence
        self._unwritten = unwritten
        self._pending: list[str] = []
        self._step = -1
        self._flushed = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def __call__(self, record: MetricsRecord) -> None:
        """Record metrics in the background. Raises the error that an earlier write has met.

        A step that was repeated after the loss of a worker is recorded already.
        """
        if record.step <= self._step:
            return
        self._step = record.step
        if self._last.done():
            self._last.result()
        self._last = self._thread.submit(self._write, record, self._last)

    def take_over(self, epochs: int) -> None:
        """Continue what a lost process has recorded, up to the end of at least so many epochs.

        Raises RunError if the metrics of an epoch were lost with the process.
        """
        assert self._unwritten
        recorded = read_lines(self.folder, self.folder.metrics)
        last = max((each["step"] for each in recorded), default=-1)
        unwritten = self._unwritten.read_bytes().decode() if self._unwritten.exists() else ""
        rest = [each for each in parsed(unwritten) if each["step"] > last]
        self._pending = [json.dumps(each) + "\n" for each in rest]
        lines = [*recorded, *rest]
        self._step = max((each["step"] for each in lines), default=-1)
        ended = max((each["epoch"] for each in lines if each["kind"] == "epoch"), default=0)
        if ended < epochs:
            raise RunError(f"the metrics of epoch {ended + 1} were lost with worker 0")

    def flush(self) -> None:
        """Wait until all metrics are written, as they must be before a checkpoint is committed."""
        self._last.result()
        self._thread.submit(self.folder.outlast, self._flush).result()

    def close(self) -> None:
        """Write all metrics and end the thread."""
        self.flush()
        self._thread.shutdown()
        if self._unwritten:
            self._unwritten.unlink(missing_ok=True)

    def _write(self, record: MetricsRecord, before: Future[None]) -> None:
        before.result()  # an error is raised again until the loop has seen it
        line = record.flat() | self._derived(record) | {"attempt": self.attempt}
        self._pending.append(to_json(line) + "\n")
        if self._unwritten:
            with self._unwritten.open("a") as file:
                file.write(self._pending[-1])
        if time.monotonic() - self._flushed >= self.folder.flush_interval_s:
            self.folder.outlast(self._flush)
        self._on_record(self.folder.outlast(lambda: self.show(record)) | line)

    def _flush(self) -> None:
        if self._pending:
            self._check_fence()
            self.folder.append(self.folder.metrics, "".join(self._pending))
            if self._unwritten:
                self._unwritten.write_bytes(b"")
        self._pending, self._flushed = [], time.monotonic()

    def show(self, record: MetricsRecord) -> dict[str, Any]:
        """Write progress.json alone; returns what it holds."""
        progress = self.progress_of(record)
        self.folder.write(self.folder.progress, to_json(progress), is_durable=False)
        return progress

    def progress_of(self, record: MetricsRecord) -> dict[str, Any]:
        """Build the contents of progress.json from a record."""
        values: dict[str, Any] = {
            **dict.fromkeys(self._of_recipe),
            **record.flat(),
            **record.metrics,
            **self._derived(record),
            "percent": percent(record.samples, self.length.samples),
            "workers": self.workers,
        }
        return {
            **{name: values[name] for name in self._shown if name in values},
            "epochs": self.length.epochs,
            "steps": self.length.steps,
            "attempt": self.attempt,
            **record.slow(),
        }

    def _derived(self, record: MetricsRecord) -> dict[str, float]:
        """Return what follows from a record: its speed in the recipe's own units, and the goodput."""
        goodput = self._goodput(record.seconds)
        known = {} if goodput is None else {"goodput": goodput}
        return self._speeds(record.samples_per_s) | known

    def show_start(self, trained: Trained) -> None:
        """Write progress.json as it stands before the first step of an attempt."""
        self.show(
            MetricsRecord(
                kind="interval",
                epoch=min(trained.epoch + 1, self.length.epochs),
                step=trained.step,
                samples=trained.samples,
                metrics=trained.metrics,
                samples_per_s=trained.samples_per_s,
                seconds=trained.seconds,
            )
        )
