"""Groups of worker processes, of which some are killed and replaced, without Ray."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from training import FORKSERVER, metrics, task_of

from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.records import RankZeroRecords
from trainyard_trainer.engine.reports import Reports
from trainyard_trainer.engine.step_sync import StepSync
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.engine.worker import work
from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.on_ray.controller.membership import MeetingPoint, Membership
from trainyard_trainer.parallel.ddp import DdpStrategy
from trainyard_trainer.parallel.worker import Worker

METHODS: dict[str, type] = {
    "backward": DdpStrategy,
    "_optimizer_step": Learner,
    "join_group": Learner,
    "load": Learner,
    "exchange": StepSync,
    "validate": Learner,
    "epoch": Reports,
    "save": RankZeroRecords,
    "write": Checkpoints,
    "note_replacement": RankZeroRecords,
    "finish": Membership,
}
"""The methods in which a worker can be lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of one worker process."""

    rank: int
    method: str
    call: int = 1
    """At which call of the method in the process, from 1."""
    is_after: bool = False
    """Whether the method has returned."""
    life: int = 0
    """Which process of the rank is lost: 0 for the first one, 1 for the one that has replaced it."""
    takes_node: bool = False
    """Whether the node of the worker is lost, and its replacement starts on another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """What a worker process must know."""

    rank: int
    life: int
    task: TrainingTask
    node: Path
    """The folder that stands for the worker's node."""
    losses: tuple[Loss, ...]


@contextmanager
def lost_at(loss: Loss) -> Iterator[None]:
    """Kill this process at a call of a method."""
    owner = METHODS[loss.method]
    method, calls = getattr(owner, loss.method), 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == loss.call and not loss.is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*arguments, **options)
        if calls == loss.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with patch.object(owner, loss.method, call):
        yield


def run_member(member: Member, meeting: MeetingPoint, controller: Connection) -> None:
    """The work of a worker process."""
    size = member.task.config.scaling.num_workers
    os.environ["RAY_CLOUD_INSTANCE_ID"] = member.node.name
    membership = Membership(meeting, KeptFiles(member.node), rank=member.rank, world_size=size)

    def listen() -> None:
        while True:
            controller.send(True)
            membership.invite(controller.recv())

    threading.Thread(target=listen, daemon=True).start()
    worker = Worker(rank=member.rank, world_size=size, device=torch.device("cpu"))
    with ExitStack() as stack:
        for loss in member.losses:
            if (loss.rank, loss.life) == (member.rank, member.life):
                stack.enter_context(lost_at(loss))
        work(member.task, worker, regrouping=membership)
    distributed.destroy_process_group()


class WorkerFailed(Exception):
    """An error: a worker has failed with an error of its own."""


class Controller:
    """Starts the workers of a run, and replaces those that are killed, as Ray Train's controller does."""

    def __init__(self, storage: Path, config: TrainerConfig, losses: Sequence[Loss]) -> None:
        self.task = task_of(config)
        self.storage, self.losses = storage, tuple(losses)
        self.meeting = MeetingPoint(
            backend="gloo", timeout_s=600, address="127.0.0.1", port=free_port(), generation=0
        )
        self.processes: dict[int, Any] = {}
        self.orders: dict[int, Connection] = {}
        self.lives: dict[int, int] = {}
        self.nodes: dict[int, Path] = {}

    def run(self) -> None:
        for rank in range(self.task.config.scaling.num_workers):
            self._start(rank)
        while self.processes:
            by_sentinel = {process.sentinel: rank for rank, process in self.processes.items()}
            ended = {by_sentinel[found] for found in wait(list(by_sentinel))}
            for rank in sorted(ended):
                process = self.processes.pop(rank)
                process.join()
                if process.exitcode == -signal.SIGKILL:
                    self._replace(rank)
                elif process.exitcode:
                    self._end()
                    raise WorkerFailed(f"worker {rank} has failed")

    def _end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def _start(self, rank: int) -> None:
        self.lives[rank] = life = self.lives.get(rank, -1) + 1
        is_lost = any(
            loss.takes_node and (loss.rank, loss.life) == (rank, life - 1) for loss in self.losses
        )
        if is_lost:
            shutil.rmtree(self.nodes[rank])
        if is_lost or rank not in self.nodes:
            self.nodes[rank] = self.storage / f"node-{rank}-{life}"
        member = Member(
            rank=rank,
            life=life,
            task=self.task,
            node=self.nodes[rank],
            losses=self.losses,
        )
        self.orders[rank], controller = FORKSERVER.Pipe()
        process = FORKSERVER.Process(
            target=run_member, args=(member, self.meeting, controller), daemon=True
        )
        process.start()
        controller.close()
        self.processes[rank] = process

    def _replace(self, rank: int) -> None:
        self.meeting = replace(self.meeting, generation=self.meeting.generation + 1)
        if rank == 0:
            self.meeting = replace(self.meeting, port=free_port())
        self._start(rank)
        self.orders[rank].recv()
        for other in self.processes.keys() - {rank}:
            try:
                self.orders[other].send(self.meeting)
            except BrokenPipeError:
                continue  # it was lost as well, and is replaced next


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def train_with_losses(
    storage: Path, config: TrainerConfig, losses: Sequence[Loss] = ()
) -> TrainerConfig:
    """Train a run to its end."""
    storage.mkdir(exist_ok=True)
    Controller(storage, config, losses).run()
    return config


def epoch_ends(config: TrainerConfig) -> list[dict[str, Any]]:
    """What depends on the training alone of the metrics of each epoch."""
    measured = {"goodput", "memory_bytes", "slow_workers"}
    return [
        {
            name: value
            for name, value in record.items()
            if name not in measured and not name.endswith("_s")
        }
        for record in metrics(config, "epoch")
    ]
