"""Explain an out-of-memory error of a GPU: how much memory the run needed, of what, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.batch_share import BatchShare, share_batch
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.errors import OutOfMemory
from trainyard_trainer.parallel.worker import Worker


@contextmanager
def out_of_memory_explained(config: TrainerConfig, worker: Worker) -> Iterator[None]:
    """Raise OutOfMemory in place of torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(explain(config, worker, error)) from error


def explain(config: TrainerConfig, worker: Worker, error: torch.OutOfMemoryError) -> str:
    """Return the error message: the numbers in its first line, then the remedies.

    The first line contains PyTorch's words "CUDA out of memory", by which `trainyard explain` finds it.
    """
    train, share = config.train, share_batch(config.train, worker.world_size)
    words = str(error).splitlines()
    remedies = "".join(f"\n       - {remedy}" for remedy in remedies_for(train, share, worker))
    return (
        f"CUDA out of memory: {memory_use(worker.device)}. Worker {worker.rank} computes "
        f"{share.micro_batch_size} of its {share.samples} samples per step at once, with "
        f"train.precision = {train.precision} and train.strategy = {train.strategy}.\n"
        f"       PyTorch reports: {words[0] if words else type(error).__name__}\n"
        f"       Use one or more of:{remedies}"
    )


def memory_use(device: torch.device) -> str:
    """Return how much of the device's memory was in use, such as `this worker used up to 70.1 GiB of ...`."""
    if device.type != "cuda":
        return f"no GPU's memory is counted on device {device.type}"
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    others = max(total - free - reserved, 0)
    return (
        f"this worker used up to {gib(torch.cuda.max_memory_allocated(device))} of the "
        f"{gib(total)} of GPU {device.index or 0} ({torch.cuda.get_device_name(device)}); "
        f"CUDA itself and other processes hold {gib(others)}"
    )


def remedies_for(train: Train, share: BatchShare, worker: Worker) -> list[str]:
    """Return the changes of the run file that lower the memory use of this run, the simplest first."""
    remedies = []
    if share.micro_batch_size > 1:
        smaller = largest_divisor(share.samples, share.micro_batch_size // 2)
        remedies.append(
            f"train.micro_batch_size: {smaller}, so that each worker computes fewer samples at once; "
            "the global batch stays as it is"
        )
    if train.precision in ("fp32", "tf32"):
        remedies.append("train.precision: bf16, which halves the memory of most activations")
    match train.strategy:
        case "ddp" if worker.world_size > 1:
            remedies.append(
                "train.strategy: fsdp2, which divides weights, gradients and optimizer state among the "
                f"{worker.world_size} workers"
            )
        case "ddp":
            remedies.append(
                "train.strategy: fsdp2 with train.fsdp2: {cpu_offload: true}, which keeps weights, "
                "gradients and optimizer state in host memory, or more GPUs with strategy fsdp2"
            )
        case "fsdp2" if not (train.fsdp2 and train.fsdp2.cpu_offload):
            remedies.append(
                "train.fsdp2.cpu_offload: true, which keeps weights, gradients and optimizer state in "
                "host memory"
            )
        case "deepspeed" if not (train.deepspeed and train.deepspeed.offload == "all"):
            remedies.append(
                "train.deepspeed: {stage: 3, offload: all}, which keeps weights and optimizer state in "
                "host memory"
            )
    remedies.append("a smaller train.model, or a GPU with more memory")
    return remedies


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return max(each for each in range(1, limit + 1) if number % each == 0)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
