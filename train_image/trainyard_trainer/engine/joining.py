"""How a worker joins a run: it claims the run's folder, agrees on the start, and listens for a stop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.regrouping import (
    Agreement,
    GroupStart,
    Handover,
    Regrouping,
    agree,
)
from trainyard_trainer.engine.state_copies import KeptStart, NodeMemory, kept_start
from trainyard_trainer.engine.task import AnyTask
from trainyard_trainer.errors import RunError, StorageError
from trainyard_trainer.hardware import gpu_facts
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.fence import Fence, newest_group
from trainyard_trainer.run_folder.run_record import WorkerFacts

STOP_POLL_S = 1.0
"""Rank 0 looks this often, in seconds, whether the run was asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPlace:
    """Ray's ids of a worker process and of its node; empty without Ray."""

    worker: str = ""
    """The id is part of the names of the process' files in Ray's own logs."""
    node: str = ""


WITHOUT_RAY = RayPlace()


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedWorker:
    """A worker that has joined its worker group and knows where to start."""

    folder: RunFolder
    fence: Fence | None
    """Rank 0's right to write to the run's folder; None on other ranks."""
    group: int
    """The number of the worker group within the attempt, from 1."""
    startup: Startup
    start: resume.Start
    """Where to start from, without the state."""
    kept: KeptStart | None
    """The state in the memory of the nodes to start from; None if it is that of the checkpoint."""
    nodes: tuple[str, ...]
    """The names of the nodes of all workers, by rank; a replacement does not know them yet."""


def join_run(
    task: AnyTask, worker: Worker, place: RayPlace, memory: NodeMemory | None = None
) -> JoinedWorker:
    """Claim the run's folder for this worker's group, and agree with the other workers on the start.

    `memory` is that of this worker's node, in which a state may be kept.
    """
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
    kept = kept_start(memory, worker) if memory else None
    begun = None
    if fence:
        chosen = resume.begin(
            folder,
            config,
            fence,
            print,
            began=startup.began,
            workers=worker.world_size,
            kept=kept.trained if kept else None,
        )
        begun = (chosen, fence.group)
    start, group = worker.from_rank_zero(begun)
    locations = worker.gathered(facts_of(worker, place))
    if fence:
        workers = {"attempt": task.attempt, "workers": locations}
        folder.write(folder.workers, json.dumps(workers), is_durable=False)
    nodes = tuple(location["node"] for location in locations)
    return JoinedWorker(
        folder=folder,
        fence=fence,
        group=group,
        startup=startup,
        start=start,
        kept=kept if start.is_from_memory else None,
        nodes=nodes,
    )


def facts_of(worker: Worker, place: RayPlace) -> dict[str, Any]:
    """Return where this worker runs, as workers.json has it."""
    facts = WorkerFacts.here(
        worker.rank,
        ray_worker=place.worker,
        ray_node=place.node,
        gpu=gpu_facts(worker.device),
    )
    return asdict(facts)


def join_as_replacement(task: AnyTask, worker: Worker) -> JoinedWorker:
    """Open the run's folder for a worker that takes the place of a lost one. It asks no other worker."""
    config = task.config
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    Fence(folder, task.attempt).check_visible()
    group = newest_group(folder, task.attempt)
    noticed = failures.noticed_at(folder, task.attempt, group)
    fence = Fence(folder, task.attempt, group) if worker.rank == 0 else None
    if fence:
        resume.take_over(folder, fence)
    return JoinedWorker(
        folder=folder,
        fence=fence,
        group=group,
        startup=Startup(began=noticed or time.time()),
        start=resume.Start(),
        kept=None,
        nodes=(),
    )


def take_place(
    learner: Learner, regrouping: Regrouping, facts: Mapping[str, Any]
) -> tuple[Agreement, GroupStart]:
    """Join the other workers in the place of a lost one, and load the state of one of them.

    The others call what `TrainingLoop` calls after the loss of a worker.
    """
    worker = learner.worker
    lost: BaseException = RunError("the other workers did not wait for the replacement of a worker")
    while True:
        try:
            regrouping.regroup(lost)
            agreed = agree(worker, learner.length, None, facts)
            handover: Handover = worker.from_rank(agreed.source, None)
            learner.load(handover.weights, handover.state)
            assert learner.kept
            learner.kept.fetch(agreed.position.trained.step, agreed.replaced)
            return agreed, handover.group_start
        except RuntimeError as error:
            if not regrouping.is_loss(error):
                raise
            lost = error


@contextmanager
def watch_for_stop(folder: RunFolder, fence: Fence) -> Iterator[Callable[[], bool]]:
    """Return a function that says whether the driver has asked the workers to save and stop.

    A thread looks for the request in the run's folder about once a second.
    """
    asked = [folder.stop(fence.attempt), folder.stop(fence.attempt, fence.group)]
    heard, ended = threading.Event(), threading.Event()

    def listen() -> None:
        while not ended.wait(STOP_POLL_S):
            with suppress(
                StorageError
            ):  # a bucket may be away for a moment: the next second will tell
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
