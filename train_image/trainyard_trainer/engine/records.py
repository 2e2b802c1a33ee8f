"""What a worker writes while it trains: rank 0 metrics and checkpoints, other ranks their shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    VALIDATION,
    Checkpoints,
)
from trainyard_trainer.checkpointing.files import FileEntry
from trainyard_trainer.checkpointing.retention import prune
from trainyard_trainer.checkpointing.saver import Saver
from trainyard_trainer.config.trainer_config import RecipeConfig
from trainyard_trainer.config.training.recipes import best_goal
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.sums import Validation
from trainyard_trainer.engine.measuring.speed import speeds_in
from trainyard_trainer.engine.regrouping import Agreement, Regrouping
from trainyard_trainer.engine.run_records import NoRecords
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_files.names import CheckpointName
from trainyard_trainer.run_folder.measurements.goodput import RunningGoodput
from trainyard_trainer.run_folder.measurements.metrics import run_metrics
from trainyard_trainer.run_folder.measurements.progress import (
    Length,
    MetricsRecord,
    Recorder,
    Trained,
)
from trainyard_trainer.run_folder.measurements.tensorboard import TensorBoard
from trainyard_trainer.run_folder.ownership.fence import Fence

Record = dict[str, Any]


class ShardedCheckpoints(Protocol):
    """Sharded checkpoints: each worker writes its shards. All workers must call each method alike."""

    def shares(self, learner: Learner) -> Record:
        """Return this worker's shards, as references to tensors that training changes."""

    def save(self, name: str, shares: Record) -> dict[str, FileEntry]:
        """Write this worker's shards, and return the manifest's entries of the files of all workers."""

    def load(self, name: str, learner: Learner) -> None:
        """Restore the learner from a checkpoint."""


class RankZeroRecords:
    """What rank 0 writes to the run's folder, as long as its fence is valid: metrics and checkpoints."""

    def __init__(
        self,
        task: TrainingTask,
        checkpoints: Checkpoints,
        shards: ShardedCheckpoints | None,
        fence: Fence,
        recorder: Recorder,
    ) -> None:
        self.task = task
        self.checkpoints = checkpoints
        self.shards = shards
        self.fence = fence
        self.recorder = recorder
        self.saver = Saver(self._save)

    def report(self, report: MetricsRecord) -> None:
        self.recorder(report)

    def save(
        self,
        trained: Trained,
        learner: Learner,
        partial_epoch: Record,
        validation: Validation | None,
    ) -> None:
        contents: dict[str, Any] = {
            STATE: {"learner": learner.state(), "partial_epoch": partial_epoch}
        }
        if not self.shards:
            contents[MODEL] = learner.weights()
        self.saver.start(
            trained=trained,
            contents=contents,
            shares=self.shards.shares(learner) if self.shards else {},
            validation=validation,
        )

    def is_saving(self) -> bool:
        return self.saver.is_busy

    def finish_saving(self) -> None:
        self.saver.wait()

    def note_replacement(self, agreement: Agreement, *, began: float) -> None:
        folder, trained = self.checkpoints.folder, agreement.position.trained
        workers = {"attempt": self.task.attempt, "workers": agreement.workers}
        folder.write(folder.workers, json.dumps(workers), is_durable=False)
        seconds = resume.note_replacement(folder, self.fence, trained, agreement.replaced, began)
        ranks = " and ".join(map(str, agreement.replaced))
        print(
            f"worker {ranks} replaced within {seconds:.1f} s: training continues after step {trained.step}",
            flush=True,
        )

    def _save(self, content: Record) -> None:
        """Write and commit a checkpoint; runs in the saver's thread."""
        trained, contents = content["trained"], content["contents"]
        name = str(CheckpointName(trained.samples, self.fence.attempt, self.fence.group))
        if self.checkpoints.is_committed(name):  # by a worker 0 that was lost after it
            return
        if content["validation"]:
            contents[VALIDATION] = content["validation"].to_json()
        # A checkpoint must not lie ahead of metrics.jsonl.
        self.recorder.flush()
        written = {}
        if self.shards:
            written = self.shards.save(name, content["shares"])
        commit_checkpoint(
            self.checkpoints,
            self.fence,
            self.task.config,
            trained,
            contents,
            data=asdict(self.task.data.info),
            written=written,
        )


def commit_checkpoint(
    checkpoints: Checkpoints,
    fence: Fence,
    config: RecipeConfig,
    trained: Trained,
    contents: Record,
    *,
    data: Record,
    written: Mapping[str, FileEntry] | None = None,
) -> None:
    """Commit a checkpoint while the fence is valid, retrying while the storage fails, and prune old ones."""

    goal = best_goal(config.train, config.checkpoint.best)

    def save() -> None:
        fence.check()
        name = checkpoints.save(
            trained,
            attempt=fence.attempt,
            group=fence.group,
            contents=contents,
            written=written,
            facts={"config": config.model_dump(mode="json"), "data": data, "goal": asdict(goal)},
            before_commit=fence.check,
        )
        prune(checkpoints, config.checkpoint, goal, name)

    checkpoints.folder.outlast(save)


class ShardRecords(NoRecords):
    """What the ranks above 0 write of a sharded checkpoint, which rank 0 commits: their shards."""

    def __init__(self, shards: ShardedCheckpoints, attempt: int, group: int) -> None:
        self.shards = shards
        self.attempt, self.group = attempt, group
        self.saver = Saver(self._save)

    def __enter__(self) -> ShardRecords:
        self.saver.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.saver.__exit__(*error)

    def save(
        self,
        trained: Trained,
        learner: Learner,
        partial_epoch: Record,
        validation: Validation | None,
    ) -> None:
        self.saver.start(trained=trained, shares=self.shards.shares(learner))

    def finish_saving(self) -> None:
        self.saver.wait()

    def _save(self, content: Record) -> None:
        """Write this worker's shards; runs in the saver's thread."""
        name = str(CheckpointName(content["trained"].samples, self.attempt, self.group))
        self.shards.save(name, content["shares"])


@contextmanager
def rank_zero_records(
    task: TrainingTask,
    checkpoints: Checkpoints,
    shards: ShardedCheckpoints | None,
    length: Length,
    trained: Trained,
    fence: Fence,
    worker: Worker,
    gauges: Callable[[Record], None],
    regrouping: Regrouping,
) -> Iterator[RankZeroRecords]:
    """Record what rank 0 writes. A rank 0 that replaces a lost one continues the records of that."""
    recipe = recipe_of(task.config, task.data.info)
    with send_to_both(
        TensorBoard(
            checkpoints.folder, samples=trained.samples, metrics=run_metrics(recipe.metrics)
        ),
        gauges,
    ) as on_record:
        recorder = Recorder(
            checkpoints.folder,
            length,
            attempt=task.attempt,
            workers=worker.world_size,
            metrics=recipe.metrics,
            speeds=lambda samples_per_s: speeds_in(recipe, samples_per_s, worker),
            goodput=RunningGoodput(checkpoints.folder, trained, worker.world_size),
            on_record=on_record,
            check_fence=fence.check,
            unwritten=regrouping.kept.metrics if regrouping.kept else None,
        )
        if regrouping.is_replacement:
            recorder.take_over(epochs=trained.epoch)
        records = RankZeroRecords(task, checkpoints, shards, fence, recorder)
        with records.saver:
            yield records
        recorder.close()


@contextmanager
def send_to_both(
    board: TensorBoard, gauges: Callable[[Record], None]
) -> Iterator[Callable[[Record], None]]:
    """Return a function that sends each record to TensorBoard and the gauges; it closes TensorBoard."""

    def also(record: Record) -> None:
        board(record)
        gauges(record)

    yield also
    board.close()
