"""Small runs for tests: their config, their data, and the loop without Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from trainer import loop
from trainer.checkpoint import MODEL, Checkpoint, Checkpoints
from trainer.config import TrainerConfig, batch_per_worker
from trainer.data import sources
from trainer.data.torch_loader import (
    GlobalBatches,
    ParquetImages,
    TorchBatches,
    ValidationBatches,
)
from trainer.folder import RunFolder
from trainer.progress import Length, Recorder, Report
from trainer.strategy import Worker

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits"},
    "train": {
        # With batch norm, and a checkpoint of 6 MB.
        "model": {
            "name": "shufflenet_v2_x0_5",
            "in_channels": 1,
            "num_classes": 10,
            "image_size": 8,
        },
        "epochs": 2,
        "global_batch_size": 128,
    },
    "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
}


def small_config(storage: Path, **changes: Any) -> TrainerConfig:
    """A run of seconds; `train__epochs=3` changes one value."""
    config = {
        key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()
    }
    config["train"]["model"] = dict(SMALL["train"]["model"])
    config["storage"] = {"path": str(storage)}
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return TrainerConfig.model_validate(config)


def open_folder(config: TrainerConfig) -> RunFolder:
    return RunFolder.open(config.storage.path, config.name)


def train_here(
    config: TrainerConfig,
    *,
    worker: Worker | None = None,
    attempt: int = 1,
    report: Callable[[Report], None] = lambda report: None,
    say: Callable[[str], None] = print,
) -> Checkpoint | None:
    """Run the loop in this process, with the files it writes and nothing of Ray."""
    worker = worker or Worker(device=torch.device("cpu"))
    folder = open_folder(config)
    data = sources.prepare(config.data, folder)
    length = Length.of(config, data.num_train)
    size = config.train.global_batch_size
    recorder = Recorder(folder, length, attempt=attempt, workers=worker.world_size)

    def record(line: Report) -> None:
        recorder(line)
        report(line)

    return loop.train(
        config,
        worker=worker,
        folder=folder,
        images=data.images,
        length=length,
        batches=TorchBatches(
            ParquetImages(folder, folder.train_data, data.images),
            GlobalBatches(
                data.num_train,
                size,
                rank=worker.rank,
                world_size=worker.world_size,
                shuffle=True,
                seed=config.train.seed,
            ),
            pin_memory=False,
        ),
        validation=ValidationBatches(
            ParquetImages(folder, folder.valid_data, data.images),
            batch_size=batch_per_worker(size, worker.world_size),
            rank=worker.rank,
            world_size=worker.world_size,
        ),
        report=record,
        attempt=attempt,
        say=say,
    )


def train_as_rank(rank: int, world_size: int, meeting_point: str, config: TrainerConfig) -> None:
    """One of several gloo processes; what multiprocessing starts must be importable."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size
    )
    worker = Worker(rank=rank, world_size=world_size, device=torch.device("cpu"))
    train_here(config, worker=worker)
    distributed.destroy_process_group()


def final_weights(config: TrainerConfig) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(open_folder(config))
    newest = checkpoints.newest()
    assert newest is not None
    return checkpoints.load(newest.name, MODEL)
