"""Groups of worker processes that all restart when one of them is killed, without Ray."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

import torch
from replaced_workers import Loss, epoch_ends, lost_at
from training import FORKSERVER, gloo_worker, metrics, open_folder, same, task_of

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.engine import state_copies
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.engine.worker import work
from trainyard_trainer.recipes.saved_model import LAST, read_saved
from trainyard_trainer.run_folder.measurements.progress import read_lines


@dataclass(frozen=True, slots=True)
class FolderMemory:
    """The memory of a node, for which a folder stands."""

    folder: Path

    @property
    def node(self) -> str:
        return self.folder.name

    def files(self) -> dict[int, Path]:
        return {int(file.name): file for file in self.folder.iterdir()}

    def make(self, rank: int) -> Path:
        (self.folder / str(rank)).touch()
        return self.folder / str(rank)

    def keep_only(self, ranks: Collection[int]) -> None:
        for rank, file in self.files().items():
            if rank not in ranks:
                file.unlink(missing_ok=True)


def run_rank(
    rank: int, life: int, memory: Path | None, meet: str, task: TrainingTask, losses: Sequence[Loss]
) -> None:
    """The work of one worker process of the worker group with this number."""
    size = task.config.scaling.num_workers
    with gloo_worker(rank, size, meet) as worker, ExitStack() as stack:
        # These steps take a few ms, and so does keeping a state: keep it after each step nevertheless.
        stack.enter_context(patch.object(state_copies, "COST_SHARE", math.inf))
        for loss in losses:
            if (loss.rank, loss.life) == (rank, life):
                stack.enter_context(lost_at(loss))
        work(task, worker, memory=FolderMemory(memory) if memory else None)


def train(
    config: TrainerConfig,
    losses: Sequence[Loss] = (),
    lost_nodes: Sequence[str] = (),
    nodes: Sequence[Sequence[str]] = (),
) -> TrainerConfig:
    """Train to the end, with a new worker group after each loss, as Ray Train's controller does.

    At the first losses, a node is lost with its memory, and then its workers start on a new one. `nodes` has
    the node of each rank for each group; all groups from its last one on are the same. Without `nodes`, no
    state is kept in memory.
    """
    storage = Path(config.storage.path)
    storage.mkdir(parents=True)
    task = task_of(config)
    for life in range(len(losses) + 1):
        memories: list[Path | None] = [None] * config.scaling.num_workers
        if nodes:
            memories = [storage / "memory" / node for node in nodes[min(life, len(nodes) - 1)]]
        for memory in filter(None, memories):
            memory.mkdir(parents=True, exist_ok=True)
        processes = [
            FORKSERVER.Process(
                target=run_rank,
                args=(rank, life, memory, f"{storage}/meet-{life}", task, losses),
            )
            for rank, memory in enumerate(memories)
        ]
        for process in processes:
            process.start()
        if life == len(losses):
            break
        wait([process.sentinel for process in processes])
        for process in processes:
            process.kill()
            process.join()
        assert -signal.SIGKILL in {process.exitcode for process in processes}
        if life < len(lost_nodes):
            shutil.rmtree(storage / "memory" / lost_nodes[life])
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return config


def starts(config: TrainerConfig) -> list[tuple[bool, int]]:
    """For each worker group: whether it started from memory, and at which step."""
    folder = open_folder(config)
    return [
        (each["is_from_memory"], each["step"])
        for each in read_lines(folder, folder.starts)
        if "startup" not in each
    ]


def final_weights(config: TrainerConfig) -> dict[str, torch.Tensor]:
    return read_saved(open_folder(config), LAST).weights


def check_same(disturbed: TrainerConfig, whole: TrainerConfig) -> None:
    assert same(final_weights(disturbed), final_weights(whole))
    assert epoch_ends(disturbed) == epoch_ends(whole)
    steps = [record["step"] for record in metrics(disturbed)]
    assert steps == sorted(set(steps))
