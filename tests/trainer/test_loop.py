"""The loop without Ray: one process, two processes, and runs that are cut anywhere."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import (
    FORKSERVER,
    final_weights,
    gloo_worker,
    metrics,
    open_folder,
    read_split,
    run_processes,
    same,
    small_config,
    task_of,
    train_as_rank,
    train_here,
)

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.metric import ACCURACY
from trainyard_trainer.config.training.train import EarlyStopping
from trainyard_trainer.data.loading.chunks import copied
from trainyard_trainer.data.loading.torch_loader import GlobalBatches
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.loop import stopping
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

ALL_STATE = {
    "train__optimizer": {"name": "adamw"},
    "train__schedule": {"name": "cosine", "warmup_samples": 500, "final_share": 0.1},
    "train__ema_decay": 0.9,
    "train__clip_norm": 1.0,
    "train__label_smoothing": 0.1,
    "train__micro_batch_size": 32,
    "train__early_stopping": {"patience_epochs": 9},
    "data__augment": {"flip": True, "crop": 1},
    "data__drop_last": False,
}
"""A run with everything that a checkpoint must bring back."""


def kill_after_saves(config: TrainerConfig, saves: int, attempt: int) -> str:
    """Train in a process of its own, and kill it when it has saved so often; returns the newest save."""
    process = FORKSERVER.Process(target=train_here, args=(config,), kwargs={"attempt": attempt})
    process.start()
    checkpoints = Checkpoints(open_folder(config))

    def saved() -> list[str]:
        names = checkpoints.names()
        return [
            name for name in names if f"-a{attempt}." in name and checkpoints.is_committed(name)
        ]

    while len(saved()) < saves and process.is_alive():
        process.join(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run was over before it was killed"
    return saved()[0]


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, id="plain"), pytest.param(ALL_STATE, id="all state", marks=pytest.mark.ci)],
)
def test_a_run_that_was_killed_in_mid_epoch_has_the_weights_of_one_that_was_not(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {**changes, "train__epochs": 3, "checkpoint__every_samples": 128}
    changes["checkpoint__keep"] = 99
    whole = small_config(tmp_path / "whole", **changes)
    cut = small_config(tmp_path / "cut", **changes)
    assert train_here(whole).resumed_from is None
    newest = kill_after_saves(cut, 3, attempt=1)
    start = train_here(cut, attempt=2).resumed_from
    assert start is not None
    assert start >= newest
    assert same(final_weights(cut), final_weights(whole))

    # Each step is on record once, and an epoch's figures are of all its steps.
    steps = [record["step"] for record in metrics(cut)]
    assert steps == sorted(set(steps))
    ended, undisturbed = metrics(cut, "epoch"), metrics(whole, "epoch")
    assert [record["epoch"] for record in ended] == [1, 2, 3]
    for key in ("loss", "accuracy", "val_loss", "val_accuracy", "samples", "learning_rate"):
        assert [record[key] for record in ended] == pytest.approx(
            [record[key] for record in undisturbed], rel=1e-6
        )


def test_a_finished_run_goes_on_when_it_gets_more_epochs(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=1)
    train_here(config)
    before = metrics(config)
    train_here(config, attempt=2)
    assert metrics(config) == before
    train_here(small_config(tmp_path, train__epochs=2), attempt=3)
    assert [record["epoch"] for record in metrics(config, "epoch")] == [1, 2]
    assert metrics(config)[-1]["step"] == 22


def test_checkpoints_come_as_often_as_asked_and_at_the_end(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=3, checkpoint__every_epochs=2, checkpoint__keep=9)
    train_here(config)
    steps = [int(name[1:13]) // 128 for name in Checkpoints(open_folder(config)).names()]
    assert steps == [33, 22]


@pytest.mark.parametrize(
    ("drop_last", "samples"), [pytest.param(True, 1408, marks=pytest.mark.ci), (False, 1438)]
)
def test_two_processes_do_the_steps_of_one(tmp_path: Path, drop_last: bool, samples: int) -> None:
    changes = {"train__epochs": 1, "data__drop_last": drop_last}
    one = small_config(tmp_path / "one", **changes)
    two = small_config(tmp_path / "two", scaling__num_workers=2, **changes)
    train_here(one)
    run_processes(train_as_rank, (2, str(tmp_path / "meet"), two), 2)
    lines = []
    for config in (one, two):
        (line,) = metrics(config, "epoch")
        lines.append(line)
        # Each of the 359 validation images was counted once, and each of the trained ones.
        assert line["val_accuracy"] * 359 == pytest.approx(
            round(line["val_accuracy"] * 359), abs=1e-3
        )
        assert line["accuracy"] * samples == pytest.approx(
            round(line["accuracy"] * samples), abs=1e-2
        )
    steps = -(-samples // 128)
    assert [line["step"] for line in lines] == [steps, steps]
    assert [line["samples"] for line in lines] == [samples, samples]
    # Saved weights have the model's own names, whoever trained them.
    assert final_weights(one).keys() == final_weights(two).keys()


def step_as_rank(
    rank: int, world_size: int, meeting_point: str, config: TrainerConfig, result: str
) -> None:
    """Two steps, the last and smaller one of an epoch among them, without batch norm's own statistics."""
    with gloo_worker(rank, world_size, meeting_point) as worker:
        task = worker.from_rank_zero(task_of(config) if rank == 0 else None)
        length = Length(epochs=1, num_samples=129, global_batch_size=128, drop_last=False)
        learner = Learner(config, task.data, length, worker)
        learner.network.eval()
        order = GlobalBatches(length, worker, shuffle=False, seed=0)
        images = decode(read_split(task.data), task.data.info)
        for step, indices in enumerate(order):
            batch = copied(images, indices, is_pinned=False)
            learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=step)
        if rank == 0:
            torch.save(learner.network.state_dict(), result)


@pytest.mark.slow
def test_weights_do_not_depend_on_how_a_batch_is_shared_out(tmp_path: Path) -> None:
    weights = []
    for workers, micro in ((1, None), (2, None), (2, 16)):
        # The last batch has one sample: the second worker gets none.
        config = small_config(tmp_path, train__micro_batch_size=micro, scaling__num_workers=workers)
        arguments = (workers, str(tmp_path / f"meet{len(weights)}"), config, str(tmp_path / "w"))
        run_processes(step_as_rank, arguments, workers)
        weights.append(torch.load(tmp_path / "w", weights_only=True))
    for other in weights[1:]:
        for key, value in weights[0].items():
            assert torch.allclose(value, other[key], atol=1e-5), key


def test_a_loss_that_explodes_ends_the_run_with_its_steps_and_keeps_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    train_here(small_config(tmp_path, train__epochs=1))
    config = small_config(tmp_path, train__epochs=2)
    checkpoints = Checkpoints(open_folder(config))
    (good,) = checkpoints.names()
    # The moment before: weights so large that the next step's loss is no number.
    weights = checkpoints.load(good, "model.pt")
    weights["fc.weight"].fill_(1e38)
    outcome = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "load", broken_load(Checkpoints.load, weights))
        outcome = train_here(config, attempt=2)
    assert outcome.diverged is not None
    assert "became NaN or infinite in steps 12 to" in outcome.diverged
    assert "Lower train.optimizer.learning_rate" in outcome.diverged
    assert checkpoints.names() == [good]


def broken_load(real: Any, weights: dict[str, torch.Tensor]) -> Any:
    def load(self: Checkpoints, name: str, file: str) -> dict[str, Any]:
        return weights if file == "model.pt" else real(self, name, file)

    return load


@pytest.mark.parametrize(
    ("rule", "values", "stops_after"),
    [
        ({"metric": "val_loss", "patience_epochs": 2}, [3, 2, 2, 2, 1], 4),
        ({"metric": "val_loss", "patience_epochs": 2}, [3, 2, 2.5, 1.9, 2], None),
        ({"metric": "val_loss", "patience_epochs": 1, "min_delta": 0.5}, [3, 2.6, 1], 2),
        ({"metric": "val_accuracy", "patience_epochs": 2}, [0.5, 0.6, 0.6, 0.59], 4),
        ({"metric": "val_loss", "patience_epochs": 1}, [math.nan, 3, 2, 1, math.nan], 5),
    ],
)
def test_a_run_ends_early_when_validation_has_not_gained_for_its_patience(
    rule: dict[str, Any], values: list[float], stops_after: int | None
) -> None:
    trained, left = Trained(), iter(values)
    while not trained.is_stopped_early and (value := next(left, None)) is not None:
        trained = replace(trained, metrics={"val_loss": value, "val_accuracy": value})
        trained = stopping(EarlyStopping(**rule), trained, [ACCURACY])
    epochs = len(values) - len(list(left))
    assert (epochs if trained.is_stopped_early else None) == stops_after


def test_a_run_that_ended_early_stays_ended(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        train__epochs=9,
        train__early_stopping={"metric": "val_accuracy", "patience_epochs": 1, "min_delta": 0.99},
    )
    outcome = train_here(config)
    assert (outcome.trained.epoch, outcome.trained.is_stopped_early) == (2, True)
    assert train_here(config, attempt=2).trained.epoch == 2
    assert len(metrics(config, "epoch")) == 2


def test_a_worker_alone_sums_what_it_has() -> None:
    worker = Worker(device=torch.device("cpu"))
    assert worker.sum(torch.ones(2)).tolist() == [1, 1]
    assert worker.from_rank_zero("a") == "a"
    assert worker.gathered("a") == ["a"]
