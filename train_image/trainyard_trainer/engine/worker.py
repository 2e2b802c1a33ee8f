"""One worker of a run, from its place in the group to the end of its loop: the same in all ways to train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from typing_extensions import assert_never

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.resume import Start
from trainyard_trainer.checkpointing.shards import Shards
from trainyard_trainer.checkpointing.zero import ZeroShards
from trainyard_trainer.config.trainer_config import TrainerConfig, code_of
from trainyard_trainer.data.loading.batch import Batches
from trainyard_trainer.data.loading.torch_loader import TorchBatches, ValidationBatches
from trainyard_trainer.engine import loop
from trainyard_trainer.engine.joining import (
    WITHOUT_RAY,
    RayPlace,
    facts_of,
    join_run,
    take_place,
    watch_for_stop,
)
from trainyard_trainer.engine.learner import Learner
from trainyard_trainer.engine.out_of_memory import out_of_memory_explained
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.recipe_errors import recipe_errors_explained
from trainyard_trainer.engine.records import (
    Record,
    ShardedCheckpoints,
    ShardRecords,
    rank_zero_records,
)
from trainyard_trainer.engine.regrouping import Agreement, FixedGroup, Regrouping
from trainyard_trainer.engine.startup_batches import StartupBatches
from trainyard_trainer.engine.step_sync import Signals
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import Diverged
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.measurements.progress import Length

MakeBatches = Callable[["TrainingTask", Length, Start, Worker], Batches]


def work(
    task: TrainingTask,
    worker: Worker,
    *,
    make_batches: MakeBatches | None = None,
    drain_s: Callable[[], float | None] = lambda: None,
    gauges: Callable[[Record], None] = lambda record: None,
    place: RayPlace = WITHOUT_RAY,
    regrouping: Regrouping | None = None,
) -> Outcome:
    """Train this worker's part of the run to its end. `place` says where it is for Ray.

    With `regrouping`, the training continues after a worker of the group was lost and replaced. Raises
    OutOfMemory if the worker's GPU has too little memory.
    """
    config = task.config
    torch.set_num_threads(config.scaling.cpus_per_worker)
    length = Length.of(config, task.data.num_train)
    regrouping = regrouping or FixedGroup()
    agreed: Agreement | None = None
    if regrouping.is_replacement:
        entered, agreed, start = take_place(task, worker, regrouping, length, place)
    else:
        entered = join_run(task, worker, place)
        start = Start.of(entered.folder, entered.name)
    folder, fence, startup = entered.folder, entered.fence, entered.startup
    if code := code_of(config):
        code_archive.make_importable(folder, code)

    with out_of_memory_explained(config, worker), recipe_errors_explained(config):
        learner = Learner(
            config,
            task.data,
            length,
            worker,
            is_resumed=start.weights is not None or start.name is not None,
        )
        checkpoints = Checkpoints(folder)
        shards = shards_of(config, checkpoints)
        if start.weights is not None and start.state is not None:
            learner.load(start.weights, start.state["learner"])
        elif start.name is not None and start.state is not None and shards:
            shards.load(start.name, learner)
            learner.load_beside_shares(start.state["learner"])
        if regrouping.sums_file:
            learner.keep_for_loss(regrouping.sums_file, is_replacement=regrouping.is_replacement)
        if agreed and agreed.arranges_buckets:
            learner.arrange_buckets()
    startup.reach("model")
    with ExitStack() as stack:
        stack.enter_context(out_of_memory_explained(config, worker))
        stack.enter_context(recipe_errors_explained(config))
        records: loop.RunRecords = loop.NoRecords()
        is_stopping: Callable[[], bool] = lambda: False  # noqa: E731
        if fence:
            records = stack.enter_context(
                rank_zero_records(
                    task, checkpoints, shards, length, start.trained, fence, worker, gauges
                )
            )
            is_stopping = stack.enter_context(watch_for_stop(folder, fence))
        elif shards:
            records = stack.enter_context(ShardRecords(shards, task.attempt, entered.group))
        try:
            # Rank 0 continues with the loss sums of all workers, a replacement with those of the lost one.
            partial_epoch = start.state["partial_epoch"] if start.state and fence else {}
            trained = loop.TrainingLoop(
                config,
                learner,
                start=loop.LoopStart(
                    trained=start.trained,
                    epoch_sums=learner.kept_sums(start.trained)
                    if agreed
                    else partial_epoch.get("loss_sums"),
                    attempt_began=startup.began,
                    position=agreed.position if agreed else None,
                ),
                batches=StartupBatches(
                    (make_batches or torch_batches)(task, length, start, worker),
                    startup,
                    lambda: resume.note_started(folder, fence, startup) if fence else None,
                ),
                validation=ValidationBatches(task.data, worker, config, learner.recipe.collate),
                records=records,
                signals=Signals(drain_s=drain_s, is_stopping=is_stopping),
                regrouping=regrouping,
                facts=facts_of(worker, place),
            ).run()
        except Diverged as error:
            return Outcome(
                resumed_from=start.name,
                trained=start.trained,
                startup=startup,
                diverged=str(error),
            )
    is_stopped = not trained.is_complete(config.train.epochs)
    return Outcome(resumed_from=start.name, trained=trained, startup=startup, is_stopped=is_stopped)


def shards_of(config: TrainerConfig, checkpoints: Checkpoints) -> ShardedCheckpoints | None:
    """Return the writer of sharded checkpoints; None where rank 0 saves the whole model."""
    match config.train.strategy:
        case "ddp":
            return None
        case "fsdp2":
            return Shards(checkpoints)
        case "deepspeed":
            return ZeroShards(checkpoints)
        case _:
            assert_never(config.train.strategy)


def torch_batches(task: TrainingTask, length: Length, start: Start, worker: Worker) -> Batches:
    collate = recipe_of(task.config, task.data.info).collate
    return TorchBatches(task.data, length, start.trained, worker, task.config, collate)
