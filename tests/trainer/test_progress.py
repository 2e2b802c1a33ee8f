"""The numbers that a run shows of itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from training import metrics, open_folder, small_config, train_here

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.metric import ACCURACY
from trainyard_trainer.errors import ConfigError, StorageError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import (
    Length,
    MetricsRecord,
    Recorder,
    Trained,
    eta_s,
    per_second,
    percent,
    read_lines,
    to_json,
)
from trainyard_trainer.run_folder.ownership.fence import Fence, Fenced

LENGTH = Length(epochs=4, num_samples=325, global_batch_size=32, drop_last=True)
LIMIT_S = 30.0


def report(step: int, *, kind: str = "interval", loss: float = 0.5) -> MetricsRecord:
    return MetricsRecord(
        kind=kind,  # type: ignore[arg-type]
        epoch=1,
        step=step,
        samples=step * 32,
        metrics={"loss": loss, "accuracy": 0.75, "val_loss": 0.4, "val_accuracy": 0.9},
        learning_rate=0.1,
        samples_per_s=100.0,
        eta_s=12.3,
        data_wait_s=0.01,
        step_s=0.02,
        checkpoint_stall_s=0.0,
        memory_bytes=2**20,
    )


@pytest.mark.parametrize(
    ("drop_last", "steps", "samples", "dropped", "last_batch"),
    [(True, 11, 1408, 29, 128), (False, 12, 1437, 0, 29)],
)
def test_a_length_counts_whole_batches_or_a_last_smaller_one(
    tmp_path: Path, drop_last: bool, steps: int, samples: int, dropped: int, last_batch: int
) -> None:
    config = small_config(tmp_path, train__epochs=3, data__drop_last=drop_last)
    length = Length.of(config, 1437)
    assert (length.steps_per_epoch, length.steps) == (steps, 3 * steps)
    assert (length.samples_per_epoch, length.samples) == (samples, 3 * samples)
    assert length.dropped_per_epoch == dropped
    sizes = [length.batch_size(step) for step in range(steps)]
    assert sizes == [128] * (steps - 1) + [last_batch]
    assert [length.samples_until(0, step) for step in range(steps + 1)] == [
        sum(sizes[:step]) for step in range(steps + 1)
    ]
    assert length.samples_until(2, 3) == 2 * samples + 3 * 128


@pytest.mark.parametrize("drop_last", [True, False])
def test_samples_that_fill_all_batches_leave_none_over(drop_last: bool) -> None:
    length = Length(epochs=2, num_samples=256, global_batch_size=128, drop_last=drop_last)
    assert (length.steps_per_epoch, length.samples, length.dropped_per_epoch) == (2, 512, 0)
    assert length.batch_size(1) == 128


@pytest.mark.parametrize(
    ("trained", "is_complete"),
    [
        (Trained(), False),
        (Trained(epoch=2), False),
        (Trained(epoch=3), True),
        (Trained(epoch=4), True),
        # The run had more epochs once, and was cut in one of them.
        (Trained(epoch=3, steps_in_epoch=1), False),
        (Trained(epoch=1, is_stopped_early=True), True),
    ],
)
def test_a_run_is_complete_after_its_epochs_or_when_it_stopped_early(
    trained: Trained, is_complete: bool
) -> None:
    assert trained.is_complete(3) is is_complete


def test_samples_per_second_are_those_of_the_steps() -> None:
    seconds = {"startup": 9.0, "data": 1.0, "compute": 2.0, "communication": 1.0, "validation": 9.0}
    assert Trained(samples=400, seconds=seconds).samples_per_s == 100.0
    assert Trained(samples=400).samples_per_s == 0.0


def test_fewer_samples_than_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="= 128 is more than the 100 training samples"):
        Length.of(small_config(tmp_path), 100)


def test_a_rate_of_no_time_is_zero() -> None:
    assert per_second(100, 0.0) == 0.0
    assert per_second(100, 4.0) == 25.0


def test_percent_stays_between_nothing_and_all() -> None:
    assert [percent(samples, 1000) for samples in (0, 333, 1000, 1200)] == [0.0, 33.3, 100.0, 100.0]


def test_the_time_to_go_follows_the_pace_of_this_attempt() -> None:
    # A resumed run at 600 of 1000 that has done 100 in 5 s.
    assert eta_s(1000, 600, 500, 5.0) == 20.0
    assert eta_s(1000, 500, 500, 0.0) == 0.0
    assert eta_s(1000, 1000, 500, 25.0) == 0.0


def test_what_is_no_number_is_null() -> None:
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.25, "d": None, "e": 3}) == (
        '{"a": null, "b": null, "c": 1.25, "d": null, "e": 3}'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-7, "1e-07"), (0.123456789, "0.1234568"), (-3e-9, "-3e-09"), (12.3456789, "12.345679")],
)
def test_a_small_number_keeps_its_significant_digits(value: float, text: str) -> None:
    assert to_json({"lr": value}) == f'{{"lr": {text}}}'


def test_a_line_that_was_cut_off_is_no_record(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    folder.append(folder.metrics, '{"step": 1}\n{"step": 2}\n{"ste')
    assert read_lines(folder, folder.metrics) == [{"step": 1}, {"step": 2}]
    assert read_lines(folder, folder.attempts) == []


# The files.


@contextmanager
def recording(folder: RunFolder, **changes: Any) -> Iterator[Recorder]:
    recorder = Recorder(folder, LENGTH, attempt=2, workers=3, metrics=[ACCURACY], **changes)
    yield recorder
    recorder.close()


def test_reports_become_lines_and_the_last_one_is_shown(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    heard: list[dict[str, Any]] = []
    with recording(folder, on_record=heard.append) as record:
        record(report(5))
        record(report(10, kind="epoch"))
    first, last = read_lines(folder, folder.metrics)
    assert (first["kind"], first["step"], "val_accuracy" in first) == ("interval", 5, False)
    assert (last["kind"], last["step"], last["val_accuracy"]) == ("epoch", 10, 0.9)
    assert [line["attempt"] for line in (first, last)] == [2, 2]
    shown = json.loads(folder.read(folder.progress))
    assert shown == {
        "percent": 25.0,
        "eta_s": 12.3,
        "epoch": 1,
        "epochs": 4,
        "step": 10,
        "steps": 40,
        "samples": 320,
        "loss": 0.5,
        "accuracy": 0.75,
        "val_accuracy": 0.9,
        "samples_per_s": 100.0,
        "loop_s": 0.0,
        "attempt": 2,
        "workers": 3,
    }
    assert [record["step"] for record in heard] == [5, 10]
    assert heard[1].items() >= (last | shown).items()


def test_a_report_returns_before_it_is_written(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    go_on = threading.Event()
    threads: set[str] = set()

    def wait(record: dict[str, Any]) -> None:
        threads.add(threading.current_thread().name)
        assert go_on.wait(LIMIT_S)

    with recording(folder, on_record=wait) as record:
        record(report(5))
        record(report(6))
        assert read_lines(folder, folder.metrics) == []
        go_on.set()
    assert [line["step"] for line in read_lines(folder, folder.metrics)] == [5, 6]
    assert threads == {"recorder_0"}


def test_all_reports_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    with recording(folder) as record:
        for step in range(1, 6):
            record(report(step))
        record.flush()
        assert [line["step"] for line in read_lines(folder, folder.metrics)] == [1, 2, 3, 4, 5]
        record(report(6))
        record.flush()
        record.flush()
        assert [line["step"] for line in read_lines(folder, folder.metrics)] == [1, 2, 3, 4, 5, 6]


def test_who_was_overtaken_adds_nothing_to_the_metrics(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    fence = Fence.claim(folder, 1)
    record = Recorder(folder, LENGTH, attempt=1, workers=1, check_fence=fence.check)
    record(report(5))
    record.flush()
    Fence.claim(folder, 2)
    record(report(10, kind="epoch"))
    with pytest.raises(Fenced, match="attempt 2 has taken over"):
        record.close()
    assert [line["step"] for line in read_lines(folder, folder.metrics)] == [5]


def test_a_checkpoint_of_an_epoch_comes_after_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, train__epochs=2)
    on_disk: list[tuple[int, int]] = []
    save = Checkpoints.save

    def look_and_save(self: Checkpoints, trained: Trained, **content: Any) -> str:
        on_disk.append((trained.epoch, len(metrics(config, "epoch"))))
        return save(self, trained, **content)

    monkeypatch.setattr(Checkpoints, "save", look_and_save)
    train_here(config)
    assert on_disk == [(1, 1), (2, 2)]


class FullDisk(RunFolder):
    """A folder in which, once the test says so, progress cannot be shown the first time."""

    def __init__(self, config: TrainerConfig) -> None:
        folder = open_folder(config)
        super().__init__(folder.filesystem, folder.root)
        self.go_on = threading.Event()
        self.refusals = 1

    def write(self, path: str, data: bytes | str, *, is_durable: bool = True) -> None:
        assert self.go_on.wait(LIMIT_S)
        self.refusals -= 1
        if self.refusals >= 0:
            raise StorageError("no space left")
        super().write(path, data, is_durable=is_durable)


@pytest.mark.parametrize(
    "use",
    [lambda record: record(report(9)), Recorder.flush, Recorder.close],
    ids=["report", "flush", "close"],
)
@pytest.mark.parametrize("later", [0, 2])
def test_a_report_that_could_not_be_written_surfaces_at_the_next_use(
    tmp_path: Path, use: Callable[[Recorder], None], later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all patience; also if more reports were given before it was known."""
    monkeypatch.setattr("trainyard_trainer.storage.PATIENCE_S", 0.0)
    folder = FullDisk(small_config(tmp_path))
    record = Recorder(folder, LENGTH, attempt=1, workers=1)
    for step in range(1 + later):
        record(report(step))
    folder.go_on.set()
    record._last.exception(timeout=LIMIT_S)
    with pytest.raises(StorageError, match="no space left"):
        use(record)


def test_an_attempt_shows_where_it_starts(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    trained = Trained(epoch=2, step=20, samples=640, metrics={"val_accuracy": 0.8})
    Recorder(folder, LENGTH, attempt=2, workers=1, metrics=[ACCURACY]).show_start(trained)
    shown = json.loads(folder.read(folder.progress))
    assert (shown["percent"], shown["epoch"], shown["eta_s"]) == (50.0, 3, None)
