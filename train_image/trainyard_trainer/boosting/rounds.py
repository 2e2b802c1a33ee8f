"""One worker of a run with `train.recipe: gradient_boosting`: training rounds, metrics and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainyard_trainer.boosting import libraries
from trainyard_trainer.boosting.libraries import LIBRARIES, Figures
from trainyard_trainer.boosting.table import PreparedTable, read_share
from trainyard_trainer.checkpointing.checkpoint import (
    VALIDATION,
    Checkpoints,
)
from trainyard_trainer.checkpointing.resume import note_started
from trainyard_trainer.checkpointing.saver import Saver
from trainyard_trainer.config.trainer_config import BoostingConfig
from trainyard_trainer.config.training.metric import VALIDATION_PREFIX, is_validation
from trainyard_trainer.config.training.recipes import metrics_of
from trainyard_trainer.engine.joining import WITHOUT_RAY, RayPlace, join_run, watch_for_stop
from trainyard_trainer.engine.measuring.timing import Clock, TimeSpent, peak_memory_bytes
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.records import commit_checkpoint, send_to_both
from trainyard_trainer.engine.reports import REPORT_INTERVAL_S
from trainyard_trainer.engine.step_sync import Signals, StepSync
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.goodput import RunningGoodput
from trainyard_trainer.run_folder.measurements.progress import (
    Length,
    MetricsRecord,
    Recorder,
    Trained,
    eta_s,
    per_second,
)
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.measurements.tensorboard import TensorBoard
from trainyard_trainer.run_folder.ownership.fence import Fence

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoostingTask:
    """The input of each worker of an attempt. It is pickled and sent over the network."""

    config: BoostingConfig
    table: PreparedTable
    attempt: int
    startup: Startup


def length_of(config: BoostingConfig, table: PreparedTable) -> Length:
    """Return the length of a run. A round uses each row once, so it counts as an epoch of one step."""
    return Length(
        epochs=config.train.rounds,
        num_samples=table.train.rows,
        global_batch_size=table.train.rows,
        drop_last=False,
    )


def work(
    task: BoostingTask,
    worker: Worker,
    *,
    network: Callable[[], Record] = dict,
    drain_s: Callable[[], float | None] = lambda: None,
    gauges: Callable[[Record], None] = lambda record: None,
    place: RayPlace = WITHOUT_RAY,
) -> Outcome:
    """Train with this worker's share of the rows until all rounds are done or the run stops.

    `network` returns LightGBM's network parameters. `place` has Ray's ids of the worker.
    """
    config, table = task.config, task.table
    library = LIBRARIES[config.train.library]
    torch.set_num_threads(config.scaling.cpus_per_worker)
    entered = join_run(task, worker, place)
    folder, fence, startup = entered.folder, entered.fence, entered.startup
    checkpoints = Checkpoints(folder)
    trained, model = Trained(), None
    if entered.start.name is not None:
        trained = checkpoints.read_manifest(entered.start.name).trained
        model = folder.read(checkpoints.path(entered.start.name, library.file))
    startup.loop_began = time.time()
    spent = TimeSpent(
        trained.seconds,
        startup=startup.loop_began - startup.began,
        activity=worker.activity,
    )
    with spent.on("data"):
        rows, valid = (
            read_share(table, part, worker.rank, worker.world_size)
            for part in (table.train, table.valid)
        )
    startup.reach("first_batch")

    def started() -> None:
        startup.reach("first_step")
        if fence:
            note_started(folder, fence, startup)

    with ExitStack() as stack:
        records, is_stopping = None, lambda: False
        if fence:
            records = stack.enter_context(_records(task, trained, fence, worker, gauges))
            is_stopping = stack.enter_context(watch_for_stop(folder, fence))
        rounds = Rounds(
            task,
            worker,
            trained,
            spent,
            records,
            Signals(drain_s=drain_s, is_stopping=is_stopping),
            started,
        )
        library.boost(
            libraries.BoostingInput(
                train=config.train,
                table=table,
                rows=rows,
                valid=valid,
                worker=worker,
                threads=config.scaling.cpus_per_worker,
                network=network,
            ),
            model,
            trained.epoch,
            rounds,
        )
    done = rounds.trained
    return Outcome(
        resumed_from=entered.start.name,
        trained=done,
        startup=startup,
        is_stopped=not rounds.diverged and not done.is_complete(config.train.rounds),
        diverged=rounds.diverged,
    )


class Rounds:
    """A callback after each round, called on all workers: report, save, and decide whether to stop."""

    def __init__(
        self,
        task: BoostingTask,
        worker: Worker,
        trained: Trained,
        spent: TimeSpent,
        records: Records | None,
        signals: Signals,
        started: Callable[[], None],
    ) -> None:
        """Store the arguments. Only rank 0 has `records`; `started` is called after the first round."""
        self.trained = trained
        self.diverged: str | None = None
        self._task = task
        self._worker = worker
        self._at_start = trained
        self._spent = spent
        self._records = records
        self._started = started
        self._length = length_of(task.config, task.table)
        self._sync = StepSync(task.config.checkpoint, worker, signals, self._length, trained)
        self._running, self._round = Clock(), Clock()

    def __call__(self, figures: Figures, model: Callable[[], bytes]) -> bool:
        """Record a round, and return whether boosting continues."""
        config, length = self._task.config, self._length
        round_s = self._round.seconds()
        self._spent.add("compute", round_s)
        if self.trained is self._at_start:
            self._started()
        number = self.trained.epoch + 1
        if not (math.isfinite(figures.loss) and math.isfinite(figures.val_loss)):
            self.diverged = (
                f"the loss became NaN or infinite in round {number}. The last good checkpoint is kept. Lower "
                "train.learning_rate, or check the data for very large labels."
            )
            return False
        self.trained = replace(
            self.trained,
            epoch=number,
            step=number,
            samples=number * length.num_samples,
            train_s=self._at_start.train_s + self._running.seconds(),
            seconds=self._spent.snapshot(),
            metrics=figures.metrics(),
        )
        is_last = number == length.epochs
        if self._records:
            self._records.report(self._report(round_s, is_last))
        order = None
        if self._sync.is_due(number) and not is_last:
            is_saving = self._records is not None and self._records.saver.is_busy
            order = self._sync.exchange(self.trained, is_saving=is_saving, is_diverged=False)
        is_wanted = number % config.checkpoint.every_rounds == 0 or is_last
        if self._records and (is_wanted or (order and order.is_save)):
            with self._spent.on("checkpoint"):
                self._records.save(replace(self.trained, seconds=self._spent.snapshot()), model())
                if order and order.is_urgent:
                    self._records.saver.wait()
        self._sync.note_epoch(self.trained)
        self._round = Clock()
        return not (order and order.is_stop)

    def _report(self, round_s: float, is_last: bool) -> MetricsRecord:
        length, now = self._length, self.trained
        eta = eta_s(length.samples, now.samples, self._at_start.samples, self._running.seconds())
        return MetricsRecord(
            kind="epoch",
            epoch=now.epoch,
            step=now.step,
            samples=now.samples,
            metrics=now.metrics,
            learning_rate=self._task.config.train.learning_rate,
            samples_per_s=per_second(length.num_samples, round_s),
            eta_s=0.0 if is_last else eta,
            data_wait_s=None,
            step_s=round_s,
            checkpoint_stall_s=0.0,
            memory_bytes=peak_memory_bytes(self._worker),
            seconds=now.seconds,
        )


class RoundRecorder(Recorder):
    """A recorder that limits how often rounds are shown: there may be a hundred in a second."""

    shown_at = -math.inf
    """The monotonic time at which a round was last shown."""

    def __init__(self, folder: RunFolder, task: BoostingTask, workers: int, **options: Any) -> None:
        length = length_of(task.config, task.table)
        super().__init__(
            folder,
            length,
            attempt=task.attempt,
            workers=workers,
            metrics=metrics_of(task.config.train),
            speeds=lambda samples_per_s: {"rows_per_s": samples_per_s},
            **options,
        )

    def show(self, report: MetricsRecord) -> Record:
        now = time.monotonic()
        if now - self.shown_at < REPORT_INTERVAL_S and report.epoch < self.length.epochs:
            return self.progress_of(report)
        self.shown_at = now
        return super().show(report)


class Records:
    """The metrics and checkpoints that rank 0 writes to the run's folder, as long as it is not fenced."""

    def __init__(self, task: BoostingTask, fence: Fence, recorder: Recorder) -> None:
        self.task = task
        self.checkpoints = Checkpoints(fence.folder)
        self.fence = fence
        self.recorder = recorder
        self.saver = Saver(self._save)

    def report(self, report: MetricsRecord) -> None:
        self.recorder(report)

    def save(self, trained: Trained, model: bytes) -> None:
        """Start to save a checkpoint in the background. Wait first for an earlier save to end."""
        self.saver.start(trained=trained, model=model)

    def _save(self, content: Record) -> None:
        """Write a checkpoint. The thread of the saver calls this method."""
        # The metrics are written first, so that no checkpoint is without its metrics.
        self.recorder.flush()
        config, trained = self.task.config, content["trained"]
        contents = {
            LIBRARIES[config.train.library].file: content["model"],
            VALIDATION: {
                name.removeprefix(VALIDATION_PREFIX): value
                for name, value in trained.metrics.items()
                if is_validation(name)
            },
        }
        data = self.task.table.to_json()
        commit_checkpoint(self.checkpoints, self.fence, config, trained, contents, data=data)


@contextmanager
def _records(
    task: BoostingTask,
    trained: Trained,
    fence: Fence,
    worker: Worker,
    gauges: Callable[[Record], None],
) -> Iterator[Records]:
    board = TensorBoard(fence.folder, samples=trained.samples, shows_epochs=False)
    with send_to_both(board, gauges) as on_record:
        recorder = RoundRecorder(
            fence.folder,
            task,
            worker.world_size,
            goodput=RunningGoodput(fence.folder, trained, worker.world_size),
            on_record=on_record,
            check_fence=fence.check,
        )
        records = Records(task, fence, recorder)
        with records.saver:
            yield records
        recorder.close()
