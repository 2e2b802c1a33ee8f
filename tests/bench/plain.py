"""Plain data-parallel training under torchrun, as one writes it by hand: what Ray Train is measured against.

    TRAINYARD_CONFIG=... torchrun --nproc-per-node 2 -m tests.bench.plain --seconds 30 --skip 5

It reads the same prepared images and learns with the same settings, but validates, saves and reports nothing.
Its last line is the number of images per second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.bench import data
from tests.bench.loops import ByHand
from trainyard_trainer.config.trainer_config import TrainerConfig, read_config
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.parallel.worker import Worker

AGREE_STEPS = 10
"""The ranks agree on the end every so many steps: each must make as many as the others."""


def batches(config: TrainerConfig, worker: Worker) -> Iterator[Batch]:
    """This rank's part of all epochs."""
    prepared = data.opened(Path(config.data.source))
    columns = decode(pq.read_table(list(prepared.train.files)), prepared.info)
    images = TensorDataset(torch.tensor(columns["image"]), torch.tensor(columns["label"]))
    sampler = DistributedSampler(images, worker.world_size, worker.rank, drop_last=True)
    share = config.train.global_batch_size // worker.world_size
    loader = DataLoader(images, share, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            yield Batch({"image": pixels, "label": labels}, labels)


def samples_per_s(config: TrainerConfig, worker: Worker, seconds: float, skip_s: float) -> float:
    """By rank 0's clock; 0 on the others."""
    loop = ByHand(config, data.opened(Path(config.data.source)).info, worker, steps=10**6)
    began, warm, steps = time.perf_counter(), None, 0
    for step, batch in enumerate(batches(config, worker)):
        if step % AGREE_STEPS == 0:
            now = time.perf_counter()
            if warm is None and now - began >= skip_s:
                warm, steps = now, 0
            is_over = worker.rank == 0 and warm is not None and now - warm >= seconds
            if worker.sum(torch.tensor(int(is_over))).item():
                return steps * config.train.global_batch_size / (now - warm) if is_over else 0.0
        loop.step(batch)
        steps += 1
    raise AssertionError("the batches never end")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--skip", type=float, required=True)
    wanted = parser.parse_args()
    config = read_config()
    torch.set_num_threads(config.scaling.cpus_per_worker)
    distributed.init_process_group("gloo")
    worker = Worker(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        device=torch.device("cpu"),
    )
    speed = samples_per_s(config, worker, wanted.seconds, wanted.skip)
    if worker.rank == 0:
        print(speed, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
