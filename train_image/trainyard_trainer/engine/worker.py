"""One worker of a run, from its place in the group to the end of its loop: the same in all ways to train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import assert_never

from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.checkpointing.resume import Start, note_started
from trainyard_trainer.checkpointing.shards import Shards
from trainyard_trainer.checkpointing.zero import ZeroShards
from trainyard_trainer.config.replaceable import NOT_REPLACED, SEVERAL_NETWORKS
from trainyard_trainer.config.trainer_config import TrainerConfig, code_of
from trainyard_trainer.data.loading.batch import Batches
from trainyard_trainer.data.loading.torch_loader import TorchBatches, ValidationBatches
from trainyard_trainer.engine import loop
from trainyard_trainer.engine.debugging import DebuggedBatches, Debugger
from trainyard_trainer.engine.joining import (
    WITHOUT_RAY,
    JoinedWorker,
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
from trainyard_trainer.engine.regrouping import Agreement, FixedGroup, GroupStart, Regrouping
from trainyard_trainer.engine.run_records import NoRecords, RunRecords
from trainyard_trainer.engine.state_copies import NodeMemory, StateCopies
from trainyard_trainer.engine.step_sync import Signals
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import Diverged
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.recipe import collate_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.measurements.progress import Length

MakeBatches = Callable[["TrainingTask", Length, Start, Worker], Batches]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyWorker:
    """A worker whose model has the state from which its training loop starts."""

    learner: Learner
    checkpoints: Checkpoints
    shards: ShardedCheckpoints | None
    start: Start
    group: GroupStart
    agreed: Agreement | None
    """What a replacement of a lost worker has agreed on with the others; None on other workers."""
    epoch_sums: torch.Tensor | None
    """The loss sums of this worker in the epoch under way, if its state was in memory."""
    copies: StateCopies | None


def work(
    task: TrainingTask,
    worker: Worker,
    *,
    make_batches: MakeBatches | None = None,
    drain_s: Callable[[], float | None] = lambda: None,
    gauges: Callable[[Record], None] = lambda record: None,
    place: RayPlace = WITHOUT_RAY,
    regrouping: Regrouping | None = None,
    memory: NodeMemory | None = None,
) -> Outcome:
    """Train this worker's part of the run to its end. `place` says where it is for Ray.

    With `regrouping`, the training continues after a worker of the group was lost and replaced. With
    `memory`, the newest state is kept there for the next worker group. Raises OutOfMemory if the worker's GPU
    has too little memory.
    """
    config = task.config
    torch.set_num_threads(config.scaling.cpus_per_worker)
    length = Length.of(config, task.data.num_train)
    regrouping = regrouping or FixedGroup()
    if regrouping.is_replacement:
        joined, start = join_as_replacement(task, worker), Start()
    else:
        joined = join_run(task, worker, place, memory)
        start = joined.start if joined.kept else Start.of(joined.folder, joined.start.name)
    if code := code_of(config):
        code_archive.make_importable(joined.folder, code)
    facts = facts_of(worker, place)

    with out_of_memory_explained(config, worker), recipe_errors_explained(config):
        ready = prepare(task, worker, length, joined, start, regrouping, facts, memory)
        joined.startup.reach("model")
        debugger = debugger_of(ready.learner, config)
        with (
            debugger.listening(),
            writing(task, worker, length, joined, ready, regrouping, gauges) as (
                records,
                is_stopping,
            ),
        ):
            joined.startup.loop_began = time.time()
            training = loop.TrainingLoop(
                config,
                ready.learner,
                start=loop_start(joined, ready),
                batches=StartupBatches(
                    DebuggedBatches(
                        (make_batches or torch_batches)(task, length, ready.start, worker),
                        debugger,
                    ),
                    joined.startup,
                    lambda: note_first_step(joined, ready),
                ),
                validation=ValidationBatches(
                    task.data, worker, config, collate_of(ready.learner.recipe)
                ),
                records=records,
                signals=Signals(drain_s=drain_s, is_stopping=is_stopping),
                after_loss=loop.AfterLoss(regrouping=regrouping, copies=ready.copies, facts=facts),
            )
            trained, diverged = ready.start.trained, None
            try:
                trained = training.run()
            except Diverged as error:
                diverged = str(error)
    return Outcome(
        resumed_from=ready.group.resumed_from,
        trained=trained,
        startup=ready.group.startup,
        diverged=diverged,
        is_stopped=diverged is None and not trained.is_complete(config.train.epochs),
    )


def prepare(
    task: TrainingTask,
    worker: Worker,
    length: Length,
    joined: JoinedWorker,
    start: Start,
    regrouping: Regrouping,
    facts: Mapping[str, Any],
    memory: NodeMemory | None,
) -> ReadyWorker:
    """Make the model, and load the state: from the checkpoint, from memory, or of another worker."""
    learner = Learner(
        task.config,
        task.data,
        length,
        worker,
        is_resumed=start.name is not None or start.is_from_memory or regrouping.is_replacement,
        is_replacement=regrouping.is_replacement,
    )
    checkpoints = Checkpoints(joined.folder)
    shards = shards_of(task.config, checkpoints)
    if start.name is not None and start.state is not None:
        if start.weights is not None:
            learner.load(start.weights, start.state["learner"])
        elif shards:
            shards.load(start.name, learner)
            learner.load_beside_tensors(start.state["learner"])
    copies = StateCopies(memory, worker, joined.group, learner) if memory else None
    sums = None
    if copies and joined.kept:
        sums = learner.new_sums().sums
        copies.load(joined.kept, sums)
    if regrouping.kept and learner.can_lose_workers:
        learner.keep_for_loss(regrouping.kept)
    elif regrouping.kept:
        if joined.fence:
            print(NOT_REPLACED.format(why=SEVERAL_NETWORKS), flush=True)
        regrouping.decline()
    agreed, group = None, GroupStart(resumed_from=start.name, startup=joined.startup)
    if regrouping.is_replacement:
        agreed, group = take_place(learner, regrouping, facts)
        start = Start(trained=agreed.position.trained)
    elif learner.kept:
        learner.kept.share(joined.nodes)
    return ReadyWorker(
        learner=learner,
        checkpoints=checkpoints,
        shards=shards,
        start=start,
        group=group,
        agreed=agreed,
        epoch_sums=sums,
        copies=copies,
    )


@contextmanager
def writing(
    task: TrainingTask,
    worker: Worker,
    length: Length,
    joined: JoinedWorker,
    ready: ReadyWorker,
    regrouping: Regrouping,
    gauges: Callable[[Record], None],
) -> Iterator[tuple[RunRecords, Callable[[], bool]]]:
    """Return what this worker writes to the run's folder, and whether it has been asked to stop."""
    if joined.fence:
        with (
            rank_zero_records(
                task,
                ready.checkpoints,
                ready.shards,
                length,
                ready.start.trained,
                joined.fence,
                worker,
                gauges,
                regrouping,
            ) as records,
            watch_for_stop(joined.folder, joined.fence) as is_stopping,
        ):
            yield records, is_stopping
    elif ready.shards:
        with ShardRecords(ready.shards, task.attempt, joined.group) as shard_records:
            yield shard_records, lambda: False
    else:
        yield NoRecords(), lambda: False


def loop_start(joined: JoinedWorker, ready: ReadyWorker) -> loop.LoopStart:
    """Return where the training loop starts: rank 0 alone knows the loss of the epoch under way."""
    start, agreed, saved_samples = ready.start, ready.agreed, None
    if joined.fence and (agreed or start.is_from_memory):
        committed = ready.checkpoints.committed()
        saved_samples = committed[0].trained.samples if committed else 0
    partial_epoch = start.state["partial_epoch"] if start.state and joined.fence else {}
    return loop.LoopStart(
        trained=start.trained,
        epoch_sums=partial_epoch.get("loss_sums") if ready.epoch_sums is None else ready.epoch_sums,
        group=ready.group,
        agreed=agreed,
        attempt_began=joined.startup.began,
        saved_samples=saved_samples,
        nodes=agreed.nodes if agreed else joined.nodes,
    )


def debugger_of(learner: Learner, config: TrainerConfig) -> Debugger:
    """Return the debugger of this worker, which stops at the recipe's loss."""
    recipe = learner.recipe
    entry = recipe.network_loss if learner.trained[0].name else recipe.loss
    return Debugger(entry, config.faults.collective_timeout_s, learner.worker.activity)


def note_first_step(joined: JoinedWorker, ready: ReadyWorker) -> None:
    """Record the first step of the worker group. Rank 0 does, unless it replaces a lost worker."""
    if joined.fence and not ready.agreed:
        note_started(joined.folder, joined.fence, joined.startup)


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
    collate = collate_of(recipe_of(task.config, task.data.info))
    return TorchBatches(task.data, length, start.trained, worker, task.config, collate)
