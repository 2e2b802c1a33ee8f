"""What saving and reporting cost a run: how long training stands still for them, and how much slower it is.

What a checkpoint costs beyond that standstill (another thread hashes and writes it, on the same CPUs) shows
beside a run that saves nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.bench import data, runs
from tests.bench.loops import Settings, again_and_again, ours, same_batch
from tests.bench.rounds import BUILD, Options, Row, Section, alternate, main, ratios, say
from trainyard_trainer.engine.run_records import NoRecords
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import MetricsRecord, Recorder
from trainyard_trainer.run_folder.measurements.tensorboard import TensorBoard

EVERY_S = 30.0
MOST_PERCENT = 1.0
"""Of a run's time."""

TINY = {"name": "shufflenet_v2_x0_5", "in_channels": 1, "num_classes": 10, "image_size": 28}

REPORT = MetricsRecord(
    kind="interval",
    epoch=1,
    step=100,
    samples=12_800,
    metrics={"loss": 1.0, "accuracy": 0.5},
    learning_rate=0.01,
    samples_per_s=1000.0,
    eta_s=100.0,
    data_wait_s=0.001,
    step_s=0.1,
    checkpoint_stall_s=0.0,
    memory_bytes=10**9,
)


# Checkpoints.


def train(path: Path, every_s: float | None, options: Options) -> list[dict[str, Any]]:
    """The metrics of a run that saves so often."""
    config = runs.config(
        "saving" if every_s else "not-saving",
        path,
        checkpoint__every_s=every_s,
        checkpoint__every_epochs=1000,
        **({"train__model": TINY} if options.quick else {}),
    )
    size, seconds = config.train.global_batch_size, options.choose(100.0, 2.0)
    skip_s = options.choose(5.0, 0.0)
    ran = runs.run(
        config, is_enough=lambda metrics: runs.steady(metrics, size, skip_s).seconds >= seconds
    )
    speed = runs.steady(ran.metrics, size, skip_s)
    stalls = [stall for stall in map(stall_s, ran.metrics) if stall]
    say(f"  {config.name}: {speed.samples_per_s:.1f} images/s, {len(stalls)} checkpoints")
    return ran.metrics


def stall_s(record: dict[str, Any]) -> float:
    """How long training stood still for a checkpoint within the epoch."""
    return record["checkpoint_stall_s"] if record["kind"] == "interval" else 0.0


def checkpoint_rows(options: Options) -> list[Row]:
    path = data.grey_images(options.choose(60_000, 4_000))
    every_s = options.choose(EVERY_S, 0.5)
    size = runs.config("size", path).train.global_batch_size
    saved: list[list[dict[str, Any]]] = []

    def speed(metrics: list[dict[str, Any]]) -> float:
        return runs.steady(metrics, size, options.choose(5.0, 0.0)).samples_per_s

    def with_checkpoints() -> float:
        saved.append(train(path, every_s, options))
        return speed(saved[-1])

    speeds = alternate(
        {"with": with_checkpoints, "without": lambda: speed(train(path, None, options))},
        options.rounds_or(3),
    )
    stalls = [[stall for stall in map(stall_s, metrics) if stall] for metrics in saved]
    totals = [runs.steady(metrics, size, 0.0).seconds for metrics in saved]
    shares = (100 * sum(each) / total for each, total in zip(stalls, totals, strict=True))
    return [
        Row(
            what=f"training stands still for checkpoints, one per {every_s:g} s",
            unit="%",
            values=tuple(shares),
            at_most=MOST_PERCENT,
        ),
        Row(
            what="training stands still for one checkpoint",
            unit="ms",
            values=tuple(1e3 * sum(each) / max(len(each), 1) for each in stalls),
        ),
        Row(
            what="images/s with them over without",
            unit="x",
            values=ratios(speeds["with"], speeds["without"]),
        ),
    ]


# Reports.


class Timed(NoRecords):
    """Reports go on record, and how long training waits for that."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seconds = 0.0

    def report(self, report: MetricsRecord) -> None:
        began = time.perf_counter()
        self.recorder(report)
        self.seconds += time.perf_counter() - began


def settings_of(path: Path, steps: int) -> Settings:
    """A loop of one worker in this process, with the data's numbers but none of its images."""
    config = runs.config("reports", path, scaling__num_workers=1, train__global_batch_size=32)
    return Settings(
        config=config,
        images=data.opened(path).info,
        worker=Worker(device=torch.device("cpu")),
        steps=steps,
        skip=2,
        clock=time.perf_counter,
    )


def recorder_of(settings: Settings) -> tuple[Recorder, Callable[[], None]]:
    """A recorder as rank 0 has it, and what closes it."""
    shutil.rmtree(BUILD / "runs" / "reports", ignore_errors=True)
    folder = RunFolder.open(str(BUILD / "runs"), "reports")
    board = TensorBoard(folder, samples=0)
    recorder = Recorder(folder, settings.length, attempt=1, workers=2, on_record=board)

    def close() -> None:
        recorder.close()
        board.close()

    return recorder, close


def one_report(settings: Settings, count: int) -> tuple[float, float]:
    """Seconds that the training thread waits for a report, and CPU seconds of it in all threads."""
    recorder, close = recorder_of(settings)
    waited, began = 0.0, time.process_time()
    for step in range(count):
        report = replace(REPORT, step=step)
        at = time.perf_counter()
        recorder(report)
        waited += time.perf_counter() - at
        recorder.flush()
    close()
    return waited / count, (time.process_time() - began) / count


def share_of_run(settings: Settings) -> float:
    """Percent of a run's time that is spent in report()."""
    recorder, close = recorder_of(settings)
    records = Timed(recorder)
    counted = ours(settings)(again_and_again(same_batch(settings), settings), records)
    close()
    return 100 * records.seconds / (counted.step_s * settings.steps)


def report_rows(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    path = data.grey_images(400)
    settings = settings_of(path, options.choose(100, 10))
    rounds = options.rounds_or(5)
    costs = [one_report(settings, options.choose(200, 10)) for _ in range(rounds)]
    # The loop reports about once a second.
    return [
        Row(
            what="report(): the training thread waits, of a second",
            unit="%",
            values=tuple(100 * waited for waited, _ in costs),
            at_most=MOST_PERCENT,
        ),
        Row(
            what="report(): CPU of all threads, of a second of one core",
            unit="%",
            values=tuple(100 * cpu for _, cpu in costs),
            at_most=MOST_PERCENT,
        ),
        Row(
            what="report(): share of a run's time",
            unit="%",
            values=tuple(share_of_run(settings) for _ in range(rounds)),
            at_most=MOST_PERCENT,
        ),
    ]


def measure(options: Options) -> list[Section]:
    return [
        Section(title="Reports", rows=tuple(report_rows(options))),
        Section(
            title="Checkpoints",
            rows=tuple(checkpoint_rows(options)),
            notes=("ResNet-18 with SGD: 90 MB in a checkpoint. 2 CPU workers on Ray.",),
        ),
    ]


if __name__ == "__main__":
    main(measure)
