"""One worker of a run, from its place in the group to the end of its loop: the same in all ways to train."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch
from typing_extensions import assert_never

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    VALIDATION,
    Checkpoints,
    Facts,
)
from trainyard_trainer.checkpointing.resume import Start
from trainyard_trainer.checkpointing.saver import Saver
from trainyard_trainer.checkpointing.shards import Shards
from trainyard_trainer.checkpointing.zero import ZeroShards
from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig
from trainyard_trainer.data.loading.batch import Batches
from trainyard_trainer.data.loading.torch_loader import TorchBatches, ValidationBatches
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine import loop
from trainyard_trainer.engine.learner import Learner
from trainyard_trainer.engine.out_of_memory import out_of_memory_explained
from trainyard_trainer.engine.startup_batches import Watched
from trainyard_trainer.engine.step_sync import Notices
from trainyard_trainer.errors import Diverged
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.registry import speeds_in
from trainyard_trainer.recipes.validation import Validation
from trainyard_trainer.run_files.names import CheckpointName
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.fence import Fence
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import Length, MetricsRecord, Recorder, Trained
from trainyard_trainer.run_folder.startup import Startup
from trainyard_trainer.run_folder.tensorboard import TensorBoard

STOP_POLL_S = 1.0

Record = dict[str, Any]
MakeBatches = Callable[["Task", Length, Start, Worker], Batches]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a worker is told; goes over the network."""

    config: TrainerConfig
    data: Prepared
    attempt: int
    startup: Startup


class AnyTask(Protocol):
    """What a worker is told, of whichever recipe."""

    @property
    def config(self) -> RecipeConfig: ...
    @property
    def attempt(self) -> int: ...
    @property
    def startup(self) -> Startup: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a worker's loop ended, when it did not fail."""

    resumed_from: str | None
    trained: Trained
    startup: Startup
    is_stopped: bool = False
    """Saved and left before the end, because it was asked to."""
    diverged: str | None = None
    """Why going on would be of no use."""

    def to_plain(self) -> Record:
        """For a network that takes no classes of ours."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Record) -> Outcome:
        trained, startup = Trained(**plain["trained"]), Startup(**plain["startup"])
        return cls(**plain | {"trained": trained, "startup": startup})


def work(
    task: Task,
    worker: Worker,
    *,
    make_batches: MakeBatches | None = None,
    drain_s: Callable[[], float | None] = lambda: None,
    gauges: Callable[[Record], None] = lambda record: None,
    ray_worker: str = "",
) -> Outcome:
    """Train this worker's part of the run to its end. `ray_worker` is its id in Ray's own logs.

    Raises OutOfMemory if the worker's GPU has too little memory.
    """
    config = task.config
    torch.set_num_threads(config.scaling.cpus_per_worker)
    length = Length.of(config, task.data.num_train)
    entered = enter(task, worker, ray_worker)
    folder, fence, startup = entered.folder, entered.fence, entered.startup
    start = Start.of(folder, entered.name)

    with out_of_memory_explained(config, worker):
        learner = Learner(config, task.data.info, length, worker)
        checkpoints = Checkpoints(folder)
        shards = shards_of(config, checkpoints)
        if start.name is not None and start.state is not None:
            if start.weights is not None:
                learner.load(start.weights, start.state["learner"])
            elif shards:
                shards.load(start.name, learner)
                learner.load_beside_shares(start.state["learner"])
    startup.reach("model")
    with ExitStack() as stack:
        stack.enter_context(out_of_memory_explained(config, worker))
        records: loop.Records = loop.NoRecords()
        is_stopping: Callable[[], bool] = lambda: False  # noqa: E731
        if fence:
            records = stack.enter_context(
                _records(task, checkpoints, shards, length, start.trained, fence, worker, gauges)
            )
            is_stopping = stack.enter_context(stop_heard(folder, fence))
        elif shards:
            records = stack.enter_context(_Shares(shards, task.attempt, entered.group))
        try:
            trained = loop.train(
                config,
                worker=worker,
                learner=learner,
                length=length,
                trained=start.trained,
                begun=start.state["begun"] if start.state else {},
                batches=Watched(
                    (make_batches or torch_batches)(task, length, start, worker),
                    startup,
                    lambda: resume.note_started(folder, fence, startup) if fence else None,
                ),
                validation=ValidationBatches(task.data, worker, config),
                records=records,
                notices=Notices(drain_s=drain_s, is_stopping=is_stopping),
                began=startup.began,
            )
        except Diverged as error:
            return Outcome(
                resumed_from=start.name,
                trained=start.trained,
                startup=startup,
                diverged=str(error),
            )
    is_stopped = not trained.is_complete(config.train.epochs)
    return Outcome(resumed_from=start.name, trained=trained, startup=startup, is_stopped=is_stopped)


def shards_of(config: TrainerConfig, checkpoints: Checkpoints) -> Sharded | None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """A worker's place in the run's folder."""

    folder: RunFolder
    fence: Fence | None
    """Rank 0 has one."""
    group: int
    """The number of the worker group."""
    startup: Startup
    name: str | None
    """The checkpoint to start from."""


def enter(task: AnyTask, worker: Worker, ray_worker: str) -> Entered:
    """Claim the folder for this worker's group, and agree on where to start."""
    config, startup, now = task.config, task.startup, time.time()
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    # The driver's: it may be on another machine.
    Fence(folder, task.attempt).check_visible()
    # Rank 0 claims the folder for this group, and decides for all where to start.
    fence = Fence.claim(folder, task.attempt) if worker.rank == 0 else None
    if fence and fence.group > 1:
        noticed = failures.noticed_at(folder, fence.attempt, fence.group - 1)
        startup = Startup(began=noticed or now)
    startup.reach("workers", now)
    begun = (resume.begin(folder, config, fence, print), fence.group) if fence else None
    name, group = worker.from_rank_zero(begun)
    places = worker.gathered(place(worker.rank, ray_worker))
    if fence:
        workers = {"attempt": task.attempt, "workers": places}
        folder.write(folder.workers, json.dumps(workers), is_durable=False)
    return Entered(folder=folder, fence=fence, group=group, startup=startup, name=name)


def place(rank: int, ray_worker: str) -> Record:
    """Where a worker can be found: its node, which on Kubernetes is a pod, and its process there."""
    node = os.environ.get("RAY_CLOUD_INSTANCE_ID") or socket.gethostname()
    return {"rank": rank, "node": node, "process": os.getpid(), "ray_worker": ray_worker}


def torch_batches(task: Task, length: Length, start: Start, worker: Worker) -> Batches:
    return TorchBatches(task.data, length, start.trained, worker, task.config)


class Sharded(Protocol):
    """Checkpoints of which each worker writes its share; all workers do everything alike."""

    def shares(self, learner: Learner) -> Record:
        """What is to be saved of this worker; a step later it is something else."""

    def save(self, name: str, shares: Record) -> dict[str, Facts]:
        """Write it, beside training; what the manifest is to say of all files."""

    def load(self, name: str, learner: Learner) -> None:
        """Go on from what was saved."""


class _Records:
    """What rank 0 leaves in the run's folder, behind its fence."""

    def __init__(
        self,
        task: Task,
        checkpoints: Checkpoints,
        shards: Sharded | None,
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
        self, trained: Trained, learner: Learner, extra: Record, validation: Validation | None
    ) -> None:
        contents = {STATE: {"learner": learner.state(), "begun": extra}}
        if not self.shards:
            contents[MODEL] = learner.network.state_dict()
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

    def _save(self, content: Record) -> None:
        """In the saver's thread."""
        trained, contents = content["trained"], content["contents"]
        if content["validation"]:
            contents[VALIDATION] = content["validation"].to_json()
        # A checkpoint whose metrics are missing could not be explained.
        self.recorder.flush()
        written = {}
        if self.shards:
            name = str(CheckpointName(trained.samples, self.fence.attempt, self.fence.group))
            written = self.shards.save(name, content["shares"])
        commit(
            self.checkpoints,
            self.fence,
            self.task.config,
            trained,
            contents,
            images=asdict(self.task.data.info),
            written=written,
        )


def commit(
    checkpoints: Checkpoints,
    fence: Fence,
    config: RecipeConfig,
    trained: Trained,
    contents: Record,
    *,
    images: Record,
    written: Mapping[str, Facts] | None = None,
) -> None:
    """Save behind the fence, as soon as the storage takes it, and remove what need not stay."""

    def save() -> None:
        fence.check()
        name = checkpoints.save(
            trained,
            attempt=fence.attempt,
            group=fence.group,
            contents=contents,
            written=written,
            facts={"config": config.model_dump(mode="json"), "images": images},
            before_commit=fence.check,
        )
        checkpoints.prune(config.checkpoint, name)

    checkpoints.folder.outlast(save)


class _Shares(loop.NoRecords):
    """What the other ranks leave where each has a share: rank 0 commits it."""

    def __init__(self, shards: Sharded, attempt: int, group: int) -> None:
        self.shards = shards
        self.attempt, self.group = attempt, group
        self.saver = Saver(self._save)

    def __enter__(self) -> _Shares:
        self.saver.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.saver.__exit__(*error)

    def save(
        self, trained: Trained, learner: Learner, extra: Record, validation: Validation | None
    ) -> None:
        self.saver.start(trained=trained, shares=self.shards.shares(learner))

    def finish_saving(self) -> None:
        self.saver.wait()

    def _save(self, content: Record) -> None:
        """In the saver's thread."""
        name = str(CheckpointName(content["trained"].samples, self.attempt, self.group))
        self.shards.save(name, content["shares"])


@contextmanager
def _records(
    task: Task,
    checkpoints: Checkpoints,
    shards: Sharded | None,
    length: Length,
    trained: Trained,
    fence: Fence,
    worker: Worker,
    gauges: Callable[[Record], None],
) -> Iterator[_Records]:
    with shown_also(TensorBoard(checkpoints.folder, samples=trained.samples), gauges) as on_record:
        recorder = Recorder(
            checkpoints.folder,
            length,
            attempt=task.attempt,
            workers=worker.world_size,
            recipe_metrics=partial(speeds_in, task.config, worker=worker),
            on_record=on_record,
            check_fence=fence.check,
        )
        records = _Records(task, checkpoints, shards, fence, recorder)
        with records.saver:
            yield records
        recorder.close()


@contextmanager
def shown_also(
    board: TensorBoard, gauges: Callable[[Record], None]
) -> Iterator[Callable[[Record], None]]:
    """Hands each record to both; the board is whole once its last one has come."""

    def also(record: Record) -> None:
        board(record)
        gauges(record)

    yield also
    board.close()


@contextmanager
def stop_heard(folder: RunFolder, fence: Fence) -> Iterator[Callable[[], bool]]:
    """Whether the driver has asked the workers to save and leave; looked up beside training."""
    asked = [folder.stop(fence.attempt), folder.stop(fence.attempt, fence.group)]
    heard, ended = threading.Event(), threading.Event()

    def listen() -> None:
        while not ended.wait(STOP_POLL_S):
            with suppress(OSError):  # a bucket may be away for a moment: the next second will tell
                if any(map(folder.exists, asked)):
                    heard.set()
                    return

    thread = threading.Thread(target=listen, name="stop", daemon=True)
    thread.start()
    try:
        yield heard.is_set
    finally:
        ended.set()
        thread.join()
