"""The training loop of one worker. It knows torch, and nothing of Ray or of the run's folder."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from trainyard_trainer.config.train import EarlyStopping
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.engine.learner import Learner
from trainyard_trainer.engine.step_sync import Notices, Talk
from trainyard_trainer.errors import Diverged
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.validation import Tally, Validation
from trainyard_trainer.run_folder.progress import (
    SPENT,
    Length,
    MetricsRecord,
    Trained,
    eta_s,
    per_second,
)

REPORT_INTERVAL_S = 1.0


class Records(Protocol):
    """What a worker leaves in the run's folder."""

    def report(self, report: MetricsRecord) -> None:
        """Put a report on record; rank 0 has some."""

    def save(
        self,
        trained: Trained,
        learner: Learner,
        extra: dict[str, Any],
        validation: Validation | None,
    ) -> None:
        """Begin to save; waits while an earlier save is under way. All workers begin alike."""

    def is_saving(self) -> bool:
        """Whether a save is under way."""

    def finish_saving(self) -> None:
        """Wait for the save under way."""


class NoRecords:
    """The records of a worker that leaves none."""

    def report(self, report: MetricsRecord) -> None: ...

    def save(
        self,
        trained: Trained,
        learner: Learner,
        extra: dict[str, Any],
        validation: Validation | None,
    ) -> None: ...

    def is_saving(self) -> bool:
        return False

    def finish_saving(self) -> None: ...


def train(
    config: TrainerConfig,
    *,
    worker: Worker,
    learner: Learner,
    length: Length,
    trained: Trained,
    begun: dict[str, Any],
    batches: Batches,
    validation: Iterable[Batch],
    records: Records,
    notices: Notices,
    began: float,
) -> Trained:
    """Train what is left of the run; returns how far it came.

    All workers call it alike. `trained` is where it starts, `begun` what the checkpoint there holds of
    an epoch under way, `began` the time.time() at which the attempt began. Raises Diverged, on all
    workers alike.
    """
    is_first = worker.rank == 0
    at_start = trained
    spent = Spent(trained.seconds, startup=time.time() - began)
    running = Clock()
    talk = Talk(config.checkpoint, worker, notices, length, trained)
    step_in_epoch = trained.steps_in_epoch

    def step() -> int:
        return trained.epoch * length.steps_per_epoch + step_in_epoch

    def so_far() -> Trained:
        """What has been trained up to this step."""
        return replace(
            trained,
            step=step(),
            samples=length.samples_until(trained.epoch, step_in_epoch),
            steps_in_epoch=step_in_epoch,
            train_s=at_start.train_s + running.seconds(),
            seconds=spent.snapshot(),
        )

    while trained.epoch < length.epochs and not trained.is_stopped_early:
        epoch = trained.epoch
        tally = Tally(worker.device)
        if step_in_epoch and is_first:
            tally.go_on_from(begun["tally"])
        interval = Interval(trained.step, spent)
        epoch_began, rate = trained.samples, 0.0
        epoch_spent = spent.snapshot()

        # Train.
        for batch in spent.waiting(batches.epoch(epoch)):
            with spent.on("compute"):
                rate = learner.step(batch, tally, epoch=epoch, step_in_epoch=step_in_epoch)
            step_in_epoch += 1
            if step_in_epoch == length.steps_per_epoch or not talk.is_due(step()):
                continue

            # About every second: report, and hear from rank 0 whether to save, to stop, to give up.
            now = so_far()
            with spent.on("compute"):
                is_bad = False
                if is_first and interval.seconds() >= REPORT_INTERVAL_S:
                    loss, accuracy = tally.since_last()
                    is_bad = not math.isfinite(loss)
                    spent.count_exchange(learner.exchange_s() * (now.step - interval.step))
                    eta = eta_s(length.samples, now.samples, at_start.samples, running.seconds())
                    records.report(interval.report(now, length, loss, accuracy, rate, eta, worker))
                    if not is_bad:
                        interval = Interval(now.step, spent)
            order = talk.hold(now, is_saving=is_first and records.is_saving(), is_bad=is_bad)
            if order.is_bad:
                raise diverged(interval.step, now.step)
            if order.is_save:
                with spent.on("checkpoint"):
                    extra = {"tally": tally.total(worker), "batches": batches.state()}
                    if not learner.is_finite():
                        raise diverged(interval.step, now.step)
                    records.save(so_far(), learner, extra, None)
                    if order.is_urgent:
                        records.finish_saving()
            if order.is_stop:
                return now

        loss_sum, hits, count = tally.total(worker).tolist()
        if is_first:
            spent.count_exchange(learner.exchange_s() * (step() - interval.step))
        if not math.isfinite(loss_sum) or not learner.is_finite():
            raise diverged(interval.step, step())

        # Validate: each worker its part, all with the same buffers.
        with spent.on("validation"):
            verdict = learner.validate(validation)

        # MetricsRecord, then save: a checkpoint whose metrics are missing could not be explained.
        step_s = spent.since(epoch_spent, "data", "compute", "communication")
        trained = replace(
            stopping(config.train.early_stopping, so_far(), verdict),
            epoch=epoch + 1,
            steps_in_epoch=0,
            loss=loss_sum / count,
            accuracy=hits / count,
            val_loss=verdict.loss,
            val_accuracy=verdict.accuracy,
        )
        step_in_epoch = 0
        is_last = trained.epoch == length.epochs or trained.is_stopped_early
        if is_first:
            records.report(
                MetricsRecord(
                    kind="epoch",
                    epoch=trained.epoch,
                    step=trained.step,
                    samples=trained.samples,
                    loss=trained.loss,
                    accuracy=trained.accuracy,
                    learning_rate=rate,
                    samples_per_s=per_second(trained.samples - epoch_began, step_s),
                    eta_s=0.0
                    if is_last
                    else eta_s(
                        length.samples, trained.samples, at_start.samples, running.seconds()
                    ),
                    data_wait_s=None,
                    step_s=None,
                    checkpoint_stall_s=spent.since(epoch_spent, "checkpoint"),
                    memory_bytes=peak_memory_bytes(worker),
                    val_loss=verdict.loss,
                    val_accuracy=verdict.accuracy,
                )
            )
        # Epochs of a single step leave no other moment to hear that the run is to stop.
        at_end = None
        if talk.is_due(trained.step) and not is_last:
            is_saving = is_first and records.is_saving()
            at_end = talk.hold(trained, is_saving=is_saving, is_bad=False)
        is_wanted = trained.epoch % config.checkpoint.every_epochs == 0 or is_last
        if is_wanted or (at_end and at_end.is_save):
            with spent.on("checkpoint"):
                records.save(replace(trained, seconds=spent.snapshot()), learner, {}, verdict)
                if at_end and at_end.is_urgent:
                    records.finish_saving()
        if at_end and at_end.is_stop:
            return trained
        talk.note_epoch(trained)
    records.finish_saving()
    return trained


def stopping(rule: EarlyStopping | None, trained: Trained, verdict: Validation) -> Trained:
    """The same with what early stopping must remember, and whether it is time."""
    if rule is None:
        return trained
    is_accuracy = rule.metric == "val_accuracy"
    value = verdict.accuracy if is_accuracy else -verdict.loss
    best = trained.best_stopping
    if best is None or math.isnan(best) or value > best + rule.min_delta:
        return replace(trained, best_stopping=value, epochs_without_gain=0)
    waited = trained.epochs_without_gain + 1
    return replace(
        trained,
        epochs_without_gain=waited,
        is_stopped_early=waited >= rule.patience_epochs,
    )


def diverged(checked: int, step: int) -> Diverged:
    """`checked` is the last step after which the loss was known to be a number."""
    return Diverged(
        f"the loss or a weight became NaN or infinite in steps {checked + 1} to {step}. The last good "
        "checkpoint is kept. Lower train.optimizer.learning_rate, or set train.clip_norm."
    )


def peak_memory_bytes(worker: Worker) -> int:
    """The most that this worker has held: on its GPU, if it has one, else in its process."""
    if worker.device.type == "cuda":
        return torch.cuda.max_memory_allocated(worker.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start


class Spent:
    """Where a worker's time goes."""

    def __init__(self, before: dict[str, float], *, startup: float) -> None:
        self._seconds = dict.fromkeys(SPENT, 0.0) | before
        self._seconds["startup"] += max(startup, 0.0)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        clock = Clock()
        try:
            yield
        finally:
            self._seconds[what] += clock.seconds()

    def add(self, what: str, seconds: float) -> None:
        self._seconds[what] += seconds

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; waiting for them is time spent on data."""
        while True:
            with self.on("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def count_exchange(self, seconds: float) -> None:
        """So much of what was taken for computing was waiting for other workers' gradients."""
        seconds = min(seconds, self._seconds["compute"])
        self._seconds["compute"] -= seconds
        self._seconds["communication"] += seconds

    def snapshot(self) -> dict[str, float]:
        return dict(self._seconds)

    def since(self, before: dict[str, float], *what: str) -> float:
        return sum(self._seconds[name] - before[name] for name in what)


class Interval:
    """The steps since the last report, after which the loss was still a number."""

    def __init__(self, step: int, spent: Spent) -> None:
        self.step = step
        self._clock = Clock()
        self._spent = spent
        self._before = spent.snapshot()

    def seconds(self) -> float:
        return self._clock.seconds()

    def report(
        self,
        now: Trained,
        length: Length,
        loss: float,
        accuracy: float,
        rate: float,
        eta: float,
        worker: Worker,
    ) -> MetricsRecord:
        steps = now.step - self.step
        return MetricsRecord(
            kind="interval",
            epoch=now.epoch + 1,
            step=now.step,
            samples=now.samples,
            loss=loss,
            accuracy=accuracy,
            learning_rate=rate,
            samples_per_s=per_second(steps * length.global_batch_size, self.seconds()),
            eta_s=eta,
            data_wait_s=self._spent.since(self._before, "data") / steps,
            step_s=self._spent.since(self._before, "compute", "communication") / steps,
            checkpoint_stall_s=self._spent.since(self._before, "checkpoint"),
            memory_bytes=peak_memory_bytes(worker),
            val_loss=now.val_loss,
            val_accuracy=now.val_accuracy,
        )
