"""The training loop of one worker. It does not know Ray or the run's folder."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.metric import LOSS, VALIDATION_PREFIX, Metric, goals_of
from trainyard_trainer.config.training.train import EarlyStopping
from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.engine.epoch import Epoch
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.sums import Validation
from trainyard_trainer.engine.measuring.slow_workers import OwnTime
from trainyard_trainer.engine.measuring.timing import Clock, TimeSpent
from trainyard_trainer.engine.regrouping import (
    Agreement,
    FixedGroup,
    GroupStart,
    Handover,
    Position,
    Regrouping,
    agree,
)
from trainyard_trainer.engine.reports import Reports
from trainyard_trainer.engine.run_records import RunRecords
from trainyard_trainer.engine.state_copies import StateCopies
from trainyard_trainer.engine.step_sync import Signals, StepSync, SyncDecision
from trainyard_trainer.errors import Diverged
from trainyard_trainer.run_folder.measurements.progress import Trained


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopStart:
    """Where a training loop starts."""

    trained: Trained
    epoch_sums: torch.Tensor | None = None
    """The loss sums of an interrupted epoch, over all workers together; None at the beginning of an epoch."""
    group: GroupStart
    agreed: Agreement | None = None
    """What the workers have agreed on, if this one takes the place of a lost one."""
    attempt_began: float
    """The time.time() at which the attempt began, or the loss of the replaced worker was noticed."""
    saved_samples: int | None = None
    """The samples up to the newest checkpoint, if that is older than the start."""
    nodes: Sequence[str]
    """The names of the workers' nodes, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AfterLoss:
    """How the training continues after the loss of a worker, and what is kept for that."""

    regrouping: Regrouping = field(default_factory=FixedGroup)
    copies: StateCopies | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Where this worker runs, as workers.json has it."""


class TrainingLoop:
    """The epochs of a run on one worker: steps, about once a second an exchange between workers, validation.

    All workers run the same loop at the same steps. Only rank 0 records metrics.
    """

    def __init__(
        self,
        config: TrainerConfig,
        learner: Learner,
        *,
        start: LoopStart,
        batches: Batches,
        validation: Iterable[Batch],
        records: RunRecords,
        signals: Signals,
        after_loss: AfterLoss | None = None,
    ) -> None:
        """Without `after_loss`, the loss of a worker ends this one."""
        self.config = config
        self.learner = learner
        self.worker, self.length = learner.worker, learner.length
        self.start = start
        self.batches = batches
        self.validation = validation
        self.records = records
        self.trained = start.trained
        """The progress at the end of the last complete epoch, or at the start of the loop."""
        self.step_in_epoch = start.trained.steps_in_epoch
        self.epoch: Epoch | None = None
        self.ended: Validation | None = None
        self.is_unsaved = False
        """Whether an epoch has ended, and it is still to be decided whether to save it."""
        self.learning_rate = (
            learner.rate(start.trained.epoch, self.step_in_epoch - 1) if self.step_in_epoch else 0.0
        )
        self.spent = TimeSpent(
            start.trained.seconds,
            startup=time.time() - start.attempt_began,
            activity=self.worker.activity,
        )
        self.running = Clock()
        self.sync = StepSync(config.checkpoint, self.worker, signals, self.length, start.trained)
        self.own_time = OwnTime(self.spent, learner, start.trained.step)
        self.reports = (
            Reports(records, learner, self.spent, start.trained, start.nodes)
            if self.worker.rank == 0
            else None
        )
        self.after_loss = after_loss or AfterLoss()
        self.regrouping, self.copies = self.after_loss.regrouping, self.after_loss.copies
        self.epoch_end: Trained | None = None
        """The progress at the end of the newest epoch, before its validation."""
        if start.saved_samples is not None:
            self.sync.note_saved(start.saved_samples)
        if start.agreed:
            self._go_to(start.agreed.position)

    def run(self) -> Trained:
        """Train until the end of the run, or until it is stopped; returns the progress.

        Raises Diverged, on all workers alike, if the loss or a weight becomes NaN or infinite.
        """
        agreed, lost = self.start.agreed, None
        began = self.start.attempt_began
        while True:
            try:
                if lost:
                    agreed = self._regroup(lost)
                if agreed:
                    self._join_group(agreed, began=began)
                else:
                    self._begin()
                trained = self._train()
                self.records.finish_saving()
                self.regrouping.finish()
                if self.copies:
                    self.copies.close()
                return trained
            except RuntimeError as error:
                if not self.regrouping.is_loss(error):
                    raise
                # The frames of the failed step hold DDP's buckets.
                traceback.clear_frames(error.__traceback__)
                lost, began = error, time.time()

    def _train(self) -> Trained:
        """Train from the current position on; returns the progress."""
        while self.is_unsaved or self._has_epochs_left():
            if not self.is_unsaved:
                self.epoch = self.epoch or self._begin_epoch()
                if stopped := self._train_epoch(self.epoch):
                    return stopped
                self._end_epoch(self.epoch)
                self.epoch = None
            if self._save_after_epoch():
                return self.trained
        return self.trained

    def _begin(self) -> None:
        """Prepare the first step of the worker group, and keep the state before it if states are kept."""
        if self._has_epochs_left():
            with self.spent.on("startup"):
                self.learner.arrange_buckets(self._step())
            self.epoch = self._begin_epoch()
            if self.learner.kept:
                self.learner.kept.write(self._step(), self.epoch.sums)
            if self.copies:
                self.copies.begin(self._progress(), self.epoch.sums.sums)

    def _has_epochs_left(self) -> bool:
        return not self.trained.is_complete(self.length.epochs)

    # The loss of a worker.

    def _position(self) -> Position:
        return Position(
            trained=self._progress(),
            is_unsaved=self.is_unsaved,
            epoch_end=self.epoch_end,
        )

    def _regroup(self, lost: BaseException) -> Agreement:
        """Join a process group with the workers that replace lost ones, and go to where all can continue."""
        assert self.learner.kept
        with self.spent.on("startup"):
            self.learner.leave_group()
            self.regrouping.regroup(lost)
            agreed = agree(self.worker, self.length, self._position(), self.after_loss.facts)
            is_source = self.worker.rank == agreed.source
            handover = self.worker.from_rank(agreed.source, self._handover() if is_source else None)
            if self._step() < agreed.position.trained.step:
                self.learner.load(handover.weights, handover.state)
            self.learner.kept.fetch(agreed.position.trained.step, agreed.replaced)
            self._go_to(agreed.position)
        return agreed

    def _handover(self) -> Handover:
        return Handover(
            weights=self.learner.weights(),
            state=self.learner.state(),
            group_start=self.start.group,
        )

    def _go_to(self, position: Position) -> None:
        """Continue at a position that is at most a step away, or an end of an epoch."""
        assert self.learner.kept
        trained, kept_sums = position.trained, self.learner.new_sums()
        self.learner.kept.restore(trained.step, kept_sums)
        is_behind = self._step() < trained.step
        self.trained, self.step_in_epoch = trained, trained.steps_in_epoch
        self.is_unsaved, self.epoch_end = position.is_unsaved, position.epoch_end
        if self.epoch and self.epoch.number != trained.epoch:
            self.epoch = None
        if self.epoch is None and trained.steps_in_epoch:
            # This worker is new, or the end of the epoch is repeated.
            self.epoch = Epoch(trained, self.learner.new_sums(), self.spent)
            self.epoch.sums.restore(kept_sums.sums)
        elif self.epoch and trained.steps_in_epoch:
            self.epoch.sums.sums.copy_(kept_sums.sums)
        elif self.epoch:
            self.epoch.sums.sums.zero_()
        if self.epoch and is_behind:
            self.epoch.batch = None
        if trained.steps_in_epoch:
            self.learning_rate = self.learner.rate(trained.epoch, trained.steps_in_epoch - 1)
        self.sync.repeat(trained.step)

    def _join_group(self, agreed: Agreement, *, began: float) -> None:
        """Let DDP exchange gradients in the new process group.

        The loss was noticed at time.time() `began`.
        """
        assert self.learner.kept
        sums = self.epoch.sums if self.epoch else self.learner.new_sums()
        with self.spent.on("startup"):
            self.learner.join_group()
            self.learner.kept.share(agreed.nodes)
            self.learner.kept.write(self._step(), sums)
            self.learner.arrange_buckets(self._step())
        self.records.note_replacement(agreed, began=began)

    # Progress.

    def _step(self) -> int:
        """Return the number of optimizer steps since the beginning of the run."""
        return self.trained.epoch * self.length.steps_per_epoch + self.step_in_epoch

    def _progress(self) -> Trained:
        """Return the progress up to the current step."""
        return replace(
            self.trained,
            step=self._step(),
            samples=self.length.samples_until(self.trained.epoch, self.step_in_epoch),
            steps_in_epoch=self.step_in_epoch,
            train_s=self.start.trained.train_s + self.running.seconds(),
            seconds=self.spent.snapshot(),
        )

    # An epoch.

    def _begin_epoch(self) -> Epoch:
        sums = self.learner.new_sums()
        if self.step_in_epoch and self.start.epoch_sums is not None:
            sums.restore(self.start.epoch_sums)
        return Epoch(self.trained, sums, self.spent)

    def _train_epoch(self, epoch: Epoch) -> Trained | None:
        """Make the steps of an epoch; returns the progress if the run was stopped before its end."""
        while True:
            is_under_way = 0 < self.step_in_epoch < self.length.steps_per_epoch
            if is_under_way and self.sync.is_due(self._step()):
                now = self._progress()
                decision = self._exchange(epoch, now)
                if decision.is_save:
                    self._save_in_epoch(epoch, is_urgent=decision.is_urgent)
                if decision.is_stop:
                    return now
            if epoch.batch is None:
                epoch.batch = self._next_batch(epoch)
            if epoch.batch is None:
                return None
            with self.spent.on("compute"):
                self.learning_rate = self.learner.step(
                    epoch.batch, epoch.sums, epoch=epoch.number, step_in_epoch=self.step_in_epoch
                )
            epoch.batch = None
            self.step_in_epoch += 1
            if self.copies and self.copies.is_due(self._step()):
                with self.spent.on("checkpoint"):
                    self.copies.keep(self._progress(), epoch.sums.sums)

    def _next_batch(self, epoch: Epoch) -> Batch | None:
        """Return the next batch of the epoch; None if it has no more."""
        if epoch.batches is None and self.step_in_epoch == self.length.steps_per_epoch:
            return None
        with self.spent.on("data"):
            epoch.batches = epoch.batches or self.batches.epoch(epoch.number)
            return next(epoch.batches, None)

    def _exchange(self, epoch: Epoch, now: Trained) -> SyncDecision:
        """Record the metrics of the last interval, and exchange signals with the other workers."""
        is_diverged = False
        with self.spent.on("compute"):
            if self.reports and self.reports.is_due(epoch, now):
                is_diverged = not self.reports.interval(epoch, now, self.learning_rate)
            is_saving = self.reports is not None and self.records.is_saving()
            own_s = self.own_time.per_step(now.step)
            with self.worker.waits.counted(self.worker.device):
                decision = self.sync.exchange(
                    now, is_saving=is_saving, is_diverged=is_diverged, own_s=own_s
                )
        if decision.is_diverged:
            raise diverged(epoch.interval.step, now.step)
        if self.reports:
            self.reports.slow_workers.add(now.step, decision.own_s)
        return decision

    def _save_in_epoch(self, epoch: Epoch, *, is_urgent: bool) -> None:
        with self.spent.on("checkpoint"):
            partial_epoch = {
                "loss_sums": epoch.sums.over_workers(self.worker),
                "batches": self.batches.state(),
            }
            if not self.learner.is_finite():
                raise diverged(epoch.interval.step, self._step())
            self.records.save(self._progress(), self.learner, partial_epoch, None)
            if is_urgent:
                self.records.finish_saving()

    def _end_epoch(self, epoch: Epoch) -> None:
        """Validate, and record the epoch's metrics."""
        with self.spent.on("compute"):
            with self.worker.waits.counted(self.worker.device):
                sums = epoch.sums.over_workers(self.worker)
            loss, metrics = epoch.sums.compute(sums)
            is_finite = math.isfinite(loss) and self.learner.is_finite()
        if self.reports:
            self.reports.count_exchange(epoch.interval, self._step())
        if not is_finite:
            raise diverged(epoch.interval.step, self._step())
        with self.spent.on("validation"):
            validation = self.learner.validate(self.validation, step=self._step())
        step_s = self.spent.since(epoch.time_before, "data", "compute", "communication")
        self.epoch_end = self._progress()
        found = {LOSS: validation.loss, **validation.metrics}
        now = replace(
            self.epoch_end,
            epoch=epoch.number + 1,
            steps_in_epoch=0,
            metrics={LOSS: loss, **metrics}
            | {f"{VALIDATION_PREFIX}{name}": value for name, value in found.items()},
        )
        self.trained = stopping(self.config.train.early_stopping, now, self.learner.recipe.metrics)
        self.step_in_epoch = 0
        self.ended, self.is_unsaved = validation, True
        # Record before saving: a checkpoint must not lie ahead of metrics.jsonl.
        if self.reports:
            self.reports.epoch(epoch, self.trained, self.learning_rate, step_s=step_s)

    def _save_after_epoch(self) -> bool:
        """Save if a checkpoint is due or requested; returns whether the run was stopped."""
        trained, rule = self.trained, self.config.checkpoint
        is_last = trained.is_complete(self.length.epochs)
        # An epoch of one step has no other step at which the workers could exchange signals.
        decision = None
        if self.sync.is_due(trained.step) and not is_last:
            is_saving = self.reports is not None and self.records.is_saving()
            decision = self.sync.exchange(trained, is_saving=is_saving, is_diverged=False)
        is_due = trained.epoch % rule.every_epochs == 0 or is_last
        if is_due or (decision and decision.is_save):
            with self.spent.on("checkpoint"):
                saved = replace(trained, seconds=self.spent.snapshot())
                self.records.save(saved, self.learner, {}, self.ended)
                if decision and decision.is_urgent:
                    self.records.finish_saving()
        self.is_unsaved = False
        if decision and decision.is_stop:
            return True
        self.sync.note_epoch(trained)
        return False


def stopping(rule: EarlyStopping | None, trained: Trained, metrics: Sequence[Metric]) -> Trained:
    """Update the state of early stopping after a validation, and decide whether to stop.

    `metrics` are those of the recipe.
    """
    if rule is None:
        return trained
    value = goals_of(metrics)[rule.metric].worth(trained.metrics[rule.metric])
    best = trained.best_stopping
    if best is None or value > best + rule.min_delta:
        return replace(trained, best_stopping=value, epochs_without_gain=0)
    waited = trained.epochs_without_gain + 1
    return replace(
        trained,
        epochs_without_gain=waited,
        is_stopped_early=waited >= rule.patience_epochs,
    )


def diverged(checked: int, step: int) -> Diverged:
    """Make the error for a loss or weight that became NaN or infinite after step `checked`, up to `step`."""
    return Diverged(
        f"the loss or a weight became NaN or infinite in steps {checked + 1} to {step}. The last good "
        "checkpoint is kept. Lower train.optimizer.learning_rate, or set train.clip_norm."
    )
