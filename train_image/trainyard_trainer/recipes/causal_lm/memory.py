"""Refuse a run whose model does not fit the GPUs, before its workers start."""

from __future__ import annotations

from trainyard_trainer.config.memory.memory_check import shortage_of_folder
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.errors import ConfigError


def require_memory(train: CausalLm, folder: str, *, num_workers: int, gpu_bytes: int) -> None:
    """Raise ConfigError if a worker needs more than the memory of a GPU, with what would make it fit.

    `gpu_bytes` is the total memory of a GPU, such as `torch.cuda.get_device_properties(0).total_memory`.
    `folder` has the model's config. A model whose memory cannot be estimated is not refused.
    """
    lines = shortage_of_folder(folder, train, num_workers=num_workers, gpu_bytes=gpu_bytes)
    if lines:
        raise ConfigError("\n       ".join(lines))
