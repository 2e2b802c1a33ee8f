"""Train a run as `python -m trainyard_trainer --without-ray` does, under conditions that a test sets.

TRAINYARD_CONFIG=... python -m tests.gpu.train [--deterministic] [--kill-from-step N] [--memory-gib G]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import torch

from trainyard_trainer import program
from trainyard_trainer.checkpointing.checkpoint import Checkpoints
from trainyard_trainer.config.trainer_config import TrainerConfig, read_config
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.run_folder.folder import RunFolder


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--deterministic", action="store_true", help="PyTorch's deterministic algorithms"
    )
    parser.add_argument("--kill-from-step", type=int, help="SIGKILL once a checkpoint is there")
    parser.add_argument("--memory-gib", type=float, help="use at most so much of the GPU's memory")
    wanted = parser.parse_args()
    if wanted.deterministic:
        # What PyTorch asks for, so that cuBLAS gives the same bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if wanted.kill_from_step is not None:
        config = read_config()
        assert isinstance(config, TrainerConfig)
        kill_from(config, wanted.kill_from_step)
    if wanted.memory_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(wanted.memory_gib * 2**30 / total, 0)
    return program.main(["--without-ray"])


def kill_from(config: TrainerConfig, first: int) -> None:
    """Kill this process at a step from `first` on, once a checkpoint within an epoch is the newest."""
    checkpoints = Checkpoints(RunFolder.open(config.storage.path, config.name))
    step, count = Learner.step, 0

    def step_or_end(learner: Learner, *batch: Any, **place: int) -> float:
        nonlocal count
        count += 1
        if count >= first:
            newest = checkpoints.newest()
            if newest and newest.trained.steps_in_epoch:
                os.kill(os.getpid(), signal.SIGKILL)
        return step(learner, *batch, **place)

    Learner.step = step_or_end  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
