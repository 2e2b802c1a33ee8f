"""The loop without Ray: one process, two processes, and a run that is cut in two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import multiprocessing
from training import final_weights, open_folder, small_config, train_as_rank, train_here

from trainer.checkpoint import Checkpoints
from trainer.errors import RunError
from trainer.loop import cosine
from trainer.progress import Report, read_lines


class Cut(Exception):
    """Stands for a process that dies."""


def die_in_epoch(epoch: int) -> object:
    def report(line: Report) -> None:
        if line.epoch == epoch:
            raise Cut

    return report


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_that_was_cut_has_the_weights_of_one_that_was_not(
    tmp_path: Path, optimizer: str
) -> None:
    changes = {"train__optimizer": {"name": optimizer}}
    whole = small_config(tmp_path / "whole", **changes)
    cut = small_config(tmp_path / "cut", **changes)
    assert train_here(whole) is None
    with pytest.raises(Cut):
        train_here(cut, report=die_in_epoch(2))  # type: ignore[arg-type]
    start = train_here(cut, attempt=2)
    assert start is not None
    assert start.trained.epoch == 1
    assert same(final_weights(cut), final_weights(whole))

    # Each step is on record once, although the second epoch was reported twice.
    folder = open_folder(cut)
    records = read_lines(folder, folder.metrics)
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert [record["epoch"] for record in records if record["kind"] == "epoch"] == [1, 2]


def test_a_finished_run_goes_on_when_it_gets_more_epochs(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=1)
    train_here(config)
    reports: list[Report] = []
    train_here(config, report=reports.append)
    assert reports == []
    train_here(small_config(tmp_path, train__epochs=2), report=reports.append, attempt=2)
    assert [report.epoch for report in reports if report.kind == "epoch"] == [2]
    assert reports[-1].step == 22


def test_checkpoints_come_as_often_as_asked_and_at_the_end(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=3, checkpoint__every_epochs=2, checkpoint__keep=9)
    train_here(config)
    steps = [int(name[1:13]) // 128 for name in Checkpoints(open_folder(config)).names()]
    assert steps == [33, 22]


def test_two_processes_do_the_steps_of_one(tmp_path: Path) -> None:
    one = small_config(tmp_path / "one", train__epochs=1)
    two = small_config(tmp_path / "two", train__epochs=1, scaling__num_workers=2)
    train_here(one)
    multiprocessing.spawn(train_as_rank, (2, str(tmp_path / "meet"), two), nprocs=2)
    lines = []
    for config in (one, two):
        folder = open_folder(config)
        (line,) = [
            record for record in read_lines(folder, folder.metrics) if record["kind"] == "epoch"
        ]
        lines.append(line)
        # Each of the 359 validation images was counted once, and each of the 1,408 trained ones.
        assert line["val_accuracy"] * 359 == pytest.approx(
            round(line["val_accuracy"] * 359), abs=1e-3
        )
        assert line["accuracy"] * 1408 == pytest.approx(round(line["accuracy"] * 1408), abs=1e-2)
    assert [line["step"] for line in lines] == [11, 11]
    assert [line["samples"] for line in lines] == [1408, 1408]
    # Saved weights have the model's own names, whoever trained them.
    assert final_weights(one).keys() == final_weights(two).keys()


def test_a_loss_that_explodes_stops_the_run_with_its_steps(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, train__optimizer={"name": "sgd", "learning_rate": 1e30}, train__epochs=1
    )
    with pytest.raises(RunError, match=r"the loss became \w+ in steps 1 to \d+\. Lower"):
        train_here(config)


def test_the_learning_rate_falls_from_its_start_to_nothing() -> None:
    rates = [cosine(0.1, samples, 1000) for samples in (0, 500, 1000, 1100)]
    assert rates == pytest.approx([0.1, 0.05, 0.0, 0.0])
    assert all(math.isfinite(rate) for rate in rates)
