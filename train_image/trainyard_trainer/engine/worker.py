"""One worker of a run, from its place in the group to the end of its loop: the same in all ways to train."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from typing_extensions import assert_never

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.resume import Start, note_started
from trainyard_trainer.checkpointing.shards import Shards
from trainyard_trainer.checkpointing.zero import ZeroShards
from trainyard_trainer.config.replaceable import NOT_REPLACED, SEVERAL_NETWORKS
from trainyard_trainer.config.trainer_config import TrainerConfig, code_of
from trainyard_trainer.data.loading.batch import Batches
from trainyard_trainer.data.loading.torch_loader import TorchBatches, ValidationBatches
from trainyard_trainer.engine import loop
from trainyard_trainer.engine.joining import (
    WITHOUT_RAY,
    RayPlace,
    facts_of,
    join_as_replacement,
    join_run,
    take_place,
    watch_for_stop,
)
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.measuring.startup_batches import StartupBatches
from trainyard_trainer.engine.out_of_memory import out_of_memory_explained
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.recipe_errors import recipe_errors_explained
from trainyard_trainer.engine.records import (
    Record,
    ShardedCheckpoints,
    ShardRecords,
    rank_zero_records,
)
from trainyard_trainer.engine.regrouping import FixedGroup, GroupStart, Regrouping
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
    if regrouping.is_replacement:
        entered, start = join_as_replacement(task, worker), Start()
    else:
        entered = join_run(task, worker, place)
        start = Start.of(entered.folder, entered.name)
    folder, fence, startup = entered.folder, entered.fence, entered.startup
    if code := code_of(config):
        code_archive.make_importable(folder, code)

    facts, agreed = facts_of(worker, place), None
    group_start = GroupStart(resumed_from=start.name, startup=startup)
    with out_of_memory_explained(config, worker), recipe_errors_explained(config):
        learner = Learner(
            config,
            task.data,
            length,
            worker,
            is_resumed=start.name is not None or regrouping.is_replacement,
            is_replacement=regrouping.is_replacement,
        )
        checkpoints = Checkpoints(folder)
        shards = shards_of(config, checkpoints)
        if start.name is not None and start.state is not None:
            if start.weights is not None:
                learner.load(start.weights, start.state["learner"])
            elif shards:
                shards.load(start.name, learner)
                learner.load_beside_shares(start.state["learner"])
        if regrouping.is_replacement:
            agreed, group_start = take_place(learner, regrouping, facts)
            start = Start(trained=agreed.position.trained)
        if regrouping.kept_file and not learner.can_lose_workers:
            if fence:
                print(NOT_REPLACED.format(why=SEVERAL_NETWORKS), flush=True)
            regrouping.decline()
        if regrouping.kept_file:
            learner.keep_for_loss(regrouping.kept_file, is_new=agreed is None)
    startup.reach("model")
    with ExitStack() as stack:
        stack.enter_context(out_of_memory_explained(config, worker))
        stack.enter_context(recipe_errors_explained(config))
        records: loop.RunRecords = loop.NoRecords()
        is_stopping: Callable[[], bool] = lambda: False  # noqa: E731
        if fence:
            records = stack.enter_context(
                rank_zero_records(
                    task,
                    checkpoints,
                    shards,
                    length,
                    start.trained,
                    fence,
                    worker,
                    gauges,
                    regrouping,
                )
            )
            is_stopping = stack.enter_context(watch_for_stop(folder, fence))
        elif shards:
            records = stack.enter_context(ShardRecords(shards, task.attempt, entered.group))
        try:
            partial_epoch = start.state["partial_epoch"] if start.state and fence else {}
            saved_samples = None
            if fence and agreed:
                committed = checkpoints.committed()
                saved_samples = committed[0].trained.samples if committed else 0
            startup.loop_began = time.time()
            trained = loop.TrainingLoop(
                config,
                learner,
                start=loop.LoopStart(
                    trained=start.trained,
                    epoch_sums=partial_epoch.get("loss_sums"),
                    group=group_start,
                    agreed=agreed,
                    attempt_began=startup.began,
                    saved_samples=saved_samples,
                    nodes=[each["node"] for each in agreed.workers] if agreed else entered.nodes,
                ),
                batches=StartupBatches(
                    (make_batches or torch_batches)(task, length, start, worker),
                    startup,
                    lambda: note_started(folder, fence, startup) if fence and not agreed else None,
                ),
                validation=ValidationBatches(task.data, worker, config, learner.recipe.collate),
                records=records,
                signals=Signals(drain_s=drain_s, is_stopping=is_stopping),
                regrouping=regrouping,
                facts=facts,
            ).run()
        except Diverged as error:
            return Outcome(
                resumed_from=group_start.resumed_from,
                trained=start.trained,
                startup=group_start.startup,
                diverged=str(error),
            )
    return Outcome(
        resumed_from=group_start.resumed_from,
        trained=trained,
        startup=group_start.startup,
        is_stopped=not trained.is_complete(config.train.epochs),
    )


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
