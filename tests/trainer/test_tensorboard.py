"""Event files of a run, read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.tensorboard import TensorBoard


def record(samples: int, kind: str = "interval", **values: Any) -> dict[str, Any]:
    known = {
        "kind": kind,
        "epoch": 1,
        "step": samples // 10,
        "samples": samples,
        "loss": 2.5,
        "accuracy": 0.25,
        "learning_rate": 0.1,
        "samples_per_s": 640.0,
        "data_wait_s": 0.001,
        "step_s": 0.125,
        "checkpoint_stall_s": 0.0,
        "memory_bytes": 2**30,
    }
    if kind == "epoch":
        known |= {"val_loss": 3.5, "val_accuracy": 0.375}
    return known | values


def read(folder: RunFolder, scratch: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the run: points of each curve."""
    for file in folder.files():
        if file.startswith("tensorboard/"):
            (scratch / Path(file).name).write_bytes(folder.read(f"{folder.root}/{file}"))
    events = EventAccumulator(str(scratch)).Reload()
    return {
        curve: [(event.step, event.value) for event in events.Scalars(curve)]
        for curve in events.Tags()["scalars"]
    }


def test_records_become_curves_over_samples(folder: RunFolder, tmp_path: Path) -> None:
    board = TensorBoard(folder, samples=0)
    board(record(100))
    board(record(200, "epoch"))
    board.close()
    curves = read(folder, tmp_path)
    assert curves["train/loss"] == [(100, 2.5)]
    assert curves["train/accuracy"] == [(100, 0.25)]
    assert curves["epoch/loss"] == [(200, 2.5)]
    assert curves["val/loss"] == [(200, 3.5)]
    assert curves["val/accuracy"] == [(200, 0.375)]
    assert curves["speed/samples_per_s"] == [(100, 640.0), (200, 640.0)]
    assert curves["speed/step_s"] == [(100, 0.125), (200, 0.125)]
    assert curves["speed/memory_bytes"] == [(100, 2**30), (200, 2**30)]


def test_what_is_unknown_has_no_point(folder: RunFolder, tmp_path: Path) -> None:
    board = TensorBoard(folder, samples=0)
    board(record(100, "epoch", val_loss=None))
    assert "val/loss" not in read(folder, tmp_path)


def test_what_is_trained_again_shows_once(folder: RunFolder, tmp_path: Path) -> None:
    """A checkpoint at 200 samples, a kill at 400, and intervals that end elsewhere the second time."""
    killed = TensorBoard(folder, samples=0)
    for samples in (100, 200, 300, 400):
        killed(record(samples, loss=1.0))
    killed.close()
    resumed = TensorBoard(folder, samples=200)
    for samples in (350, 500):
        resumed(record(samples, loss=3.0))
    resumed.close()
    assert read(folder, tmp_path)["train/loss"] == [(100, 1), (200, 1), (350, 3), (500, 3)]


@pytest.mark.parametrize(
    ("seconds", "kind", "is_there"),
    [
        (0.0, "interval", False),
        (30.0, "interval", True),
        (0.0, "epoch", True),
    ],
)
def test_the_file_grows_at_the_end_of_an_epoch_and_after_a_while(
    folder: RunFolder, seconds: float, kind: str, is_there: bool
) -> None:
    times = iter((0.0, seconds, seconds))
    TensorBoard(folder, samples=0, now=lambda: next(times))(record(100, kind))
    assert bool(folder.files()) == is_there
