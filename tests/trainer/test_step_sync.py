"""When workers sync, and what rank 0 then has all of them do at the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Group, ThreadWorker, open_folder, small_config, train_here

from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.config.checkpoint import CheckpointConfig
from trainyard_trainer.engine import joining
from trainyard_trainer.engine.step_sync import LEAVE_BEFORE_DRAIN_S, Signals, StepSync, SyncDecision
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

CPU = torch.device("cpu")
BATCH = 10
LENGTH = Length(epochs=100, num_samples=10_000, global_batch_size=BATCH, drop_last=True)
NEVER = CheckpointConfig(every_s=None)

NOTHING = SyncDecision(is_save=False, is_urgent=False, is_stop=False, is_diverged=False)
SAVE = SyncDecision(is_save=True, is_urgent=False, is_stop=False, is_diverged=False)
URGENT = SyncDecision(is_save=True, is_urgent=True, is_stop=False, is_diverged=False)
STOP = SyncDecision(is_save=True, is_urgent=True, is_stop=True, is_diverged=False)
BAD = SyncDecision(is_save=False, is_urgent=False, is_stop=False, is_diverged=True)


@dataclass
class Training:
    """Steps that take as long as the test says, and what was ordered after which of them."""

    rule: CheckpointConfig = NEVER
    start_step: int = 0
    worker: Worker = field(default_factory=lambda: Worker(device=CPU))
    seconds: float = 0.0
    leaves_at: float | None = None
    """When the machine goes away."""
    is_stopping: bool = False
    is_saving: bool = False
    is_diverged: bool = False
    orders: dict[int, SyncDecision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        signals = Signals(drain_s=self.left_s, is_stopping=lambda: self.is_stopping)
        self.step = self.start_step
        self.sync = StepSync(
            self.rule, self.worker, signals, LENGTH, self.trained(), now=lambda: self.seconds
        )

    def trained(self) -> Trained:
        return Trained(step=self.step, samples=self.step * BATCH)

    def left_s(self) -> float | None:
        return None if self.leaves_at is None else max(self.leaves_at - self.seconds, 0.0)

    def go(self, steps: int, *, step_s: float = 1.0) -> Training:
        for _ in range(steps):
            self.step += 1
            self.seconds += step_s
            now = self.trained()
            if self.sync.is_due(now.step):
                order = self.sync.exchange(
                    now, is_saving=self.is_saving, is_diverged=self.is_diverged
                )
                self.orders[self.step] = order
        return self

    def steps_with(self, order: SyncDecision) -> list[int]:
        return [step for step, given in self.orders.items() if given == order]


# When.


@pytest.mark.parametrize(
    ("step_s", "talks"),
    [
        (5.0, [1, 2, 3, 4, 5, 6]),
        (1.0, [1, 2, 3, 4, 5, 6]),
        (0.5, [1, 3, 5, 7, 9, 11]),
        (0.1, [1, 11, 21, 31, 41, 51]),
        (0.001, [1, 1001, 2001, 3001, 4001, 5001]),
    ],
)
def test_workers_talk_after_the_first_step_and_then_about_once_a_second(
    step_s: float, talks: list[int]
) -> None:
    training = Training().go(talks[-1], step_s=step_s)
    assert list(training.orders) == talks
    assert set(training.orders.values()) == {NOTHING}


def test_the_time_between_talks_follows_the_pace_of_the_steps() -> None:
    training = Training().go(11, step_s=0.1)
    # A slow stretch is known at the next sync, after which there are fewer steps to the one after.
    training.go(10, step_s=1.0).go(3, step_s=1.0)
    assert list(training.orders) == [1, 11, 21, 22, 23, 24]


def test_a_talk_that_was_due_at_the_end_of_an_epoch_comes_after_it() -> None:
    training = Training()
    training.go(1)
    training.step += 5
    assert training.sync.is_due(training.step)


# Saving by the clock and by samples.


def test_a_save_comes_when_the_last_one_is_so_old() -> None:
    training = Training(CheckpointConfig(every_s=5)).go(18)
    assert training.steps_with(SAVE) == [5, 10, 15]


def test_a_save_comes_after_so_many_samples_however_fast_they_are() -> None:
    rule = CheckpointConfig(every_s=None, every_samples=20 * BATCH)
    training = Training(rule, start_step=7).go(70, step_s=0.001)
    assert training.steps_with(SAVE) == [27, 47, 67]


def test_samples_that_are_no_whole_batches_call_for_a_save_at_the_step_that_fills_them() -> None:
    training = Training(CheckpointConfig(every_s=None, every_samples=25)).go(10, step_s=0.001)
    assert training.steps_with(SAVE) == [3, 6, 9]
    # There is no sync before its time, which would make all wait.
    assert list(training.orders) == [1, 3, 6, 9]


def test_nothing_asks_for_a_save_within_an_epoch_if_no_rule_does() -> None:
    assert Training(NEVER).go(1000).steps_with(SAVE) == []


@pytest.mark.parametrize(
    "rule", [CheckpointConfig(every_s=5), CheckpointConfig(every_s=None, every_samples=5 * BATCH)]
)
def test_a_save_waits_until_the_one_before_is_done(rule: CheckpointConfig) -> None:
    training = Training(rule)
    training.is_saving = True
    training.go(8)
    assert training.steps_with(SAVE) == []
    training.is_saving = False
    training.go(5)
    assert training.steps_with(SAVE) == [9]


@pytest.mark.parametrize(("every_epochs", "next_save"), [(1, [8]), (2, [5])])
def test_the_save_at_the_end_of_an_epoch_counts(every_epochs: int, next_save: list[int]) -> None:
    training = Training(CheckpointConfig(every_s=5, every_epochs=every_epochs)).go(3)
    training.sync.note_epoch(Trained(epoch=1, step=3, samples=3 * BATCH))
    assert training.go(6).steps_with(SAVE) == next_save


# Signals.


def test_a_drain_notice_brings_a_save_when_it_comes_and_one_with_which_the_machine_is_left() -> (
    None
):
    training = Training().go(3)
    training.leaves_at = training.seconds + 60.0
    training.go(51)
    assert training.steps_with(URGENT) == [4]
    # Of its 60 s less than LEAVE_BEFORE_DRAIN_S are left.
    assert training.steps_with(STOP) == [3 + 60 - LEAVE_BEFORE_DRAIN_S + 1]
    assert training.steps_with(NOTHING) == [1, 2, 3, *range(5, 54)]


def test_a_machine_that_goes_within_seconds_is_left_at_once() -> None:
    training = Training(leaves_at=LEAVE_BEFORE_DRAIN_S).go(1)
    assert training.orders == {1: STOP}


def test_a_second_notice_is_heard_once_the_first_is_withdrawn() -> None:
    training = Training()
    for _ in range(2):
        training.leaves_at = 60.0
        training.go(2)
        training.leaves_at = None
        training.go(2)
    assert training.steps_with(URGENT) == [1, 5]


def test_a_notice_does_not_wait_for_a_save_under_way() -> None:
    training = Training(is_saving=True, leaves_at=60.0).go(1)
    assert training.orders == {1: URGENT}


def test_the_save_of_a_notice_counts_for_the_rules() -> None:
    training = Training(CheckpointConfig(every_s=5)).go(2)
    training.leaves_at = 600.0
    assert training.go(7).steps_with(SAVE) == [8]


def test_workers_that_are_to_stop_save_first() -> None:
    training = Training().go(2)
    training.is_stopping = True
    assert training.go(1).orders[3] == STOP


def test_a_bad_loss_is_told_to_all_and_nothing_is_saved_for_it() -> None:
    assert Training(is_diverged=True).go(1).orders == {1: BAD}


# Several workers.


def in_group(
    size: int, tell: Callable[[Training], Any] = lambda training: None, steps: int = 40
) -> list[Training]:
    """The same steps on each worker, each with its own pace; `tell` is told of their trainings."""

    def work(worker: ThreadWorker) -> Training:
        training = Training(CheckpointConfig(every_s=5), worker=worker)
        tell(training)
        return training.go(steps, step_s=0.4 + 0.05 * worker.rank)

    return Group(size).run(work)


def notice_at(rank: int) -> Callable[[Training], None]:
    def tell(training: Training) -> None:
        if training.worker.rank == rank:
            training.leaves_at = 60.0

    return tell


def test_all_workers_get_the_orders_of_rank_0_at_the_same_steps() -> None:
    first, second, third = in_group(3)
    assert first.orders == second.orders == third.orders
    # By its clock, though the others' go faster.
    assert first.steps_with(SAVE)[0] * 0.4 == pytest.approx(5, abs=1)


def test_a_notice_that_one_worker_has_reaches_all() -> None:
    first, second = in_group(2, notice_at(rank=1))
    assert first.orders == second.orders
    assert first.steps_with(URGENT) == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_asks_whether_to_stop(rank: int) -> None:
    def tell(training: Training) -> None:
        training.is_stopping = training.worker.rank == rank

    first, second = in_group(2, tell, steps=1)
    assert first.orders == second.orders == {1: STOP if rank == 0 else NOTHING}


# In the loop.


@pytest.mark.parametrize("group", [0, 1], ids=["attempt", "worker group"])
def test_a_run_of_one_step_per_epoch_hears_that_it_is_to_stop(
    group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(
        tmp_path, train__global_batch_size=1438, train__epochs=50, checkpoint__every_epochs=50
    )
    monkeypatch.setattr(joining, "STOP_POLL_S", 0.01)
    folder = open_folder(config)
    folder.write(folder.stop(1, group), "")
    outcome = train_here(config)
    assert outcome.is_stopped
    newest = Checkpoints(folder).newest()
    assert newest is not None
    assert newest.trained.epoch == outcome.trained.epoch < 50
