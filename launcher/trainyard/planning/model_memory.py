"""The memory of the workers of `causal_lm`, if the model's folder is on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.errors import ConfigError
from trainyard.platform import Pool
from trainyard.run_file.models import RunConfig
from trainyard_trainer.config.memory.memory_check import (
    GIB,
    gib,
    has_config,
    memory_text,
    shape_of_folder,
    shortage_of_folder,
)
from trainyard_trainer.config.memory.model_memory import worker_memory
from trainyard_trainer.config.memory.model_shape import UnknownShape
from trainyard_trainer.config.training.train import CausalLm


def gpu_memory_gib(pools: Sequence[Pool]) -> int | None:
    """Return the memory of the smallest GPU of the pools, or None if the platform does not name it."""
    sizes = [pool.gpu_memory_gib for pool in pools if pool.gpu_memory_gib is not None]
    return min(sizes, default=None)


def require_memory(run: RunConfig, pools: Sequence[Pool], fewest_workers: int) -> None:
    """Raise ConfigError if a model does not fit the GPUs, with what would make it fit."""
    train, size = getattr(run, "train", None), gpu_memory_gib(pools)
    if not isinstance(train, CausalLm) or size is None or not has_config(train.model.path):
        return
    lines = shortage_of_folder(
        train.model.path, train, num_workers=fewest_workers, gpu_bytes=size * GIB
    )
    if lines:
        raise ConfigError(*lines)


def memory_row(
    run: RunConfig, pools: Sequence[Pool], fewest_workers: int
) -> list[tuple[str, str, str]]:
    """Return the row of a worker's memory, which is largest with the fewest workers of an elastic run."""
    train, use_gpu = getattr(run, "train", None), pools[0].gpus_per_node > 0
    if not isinstance(train, CausalLm):
        return []
    name, size = f"memory per {'GPU' if use_gpu else 'worker'}", gpu_memory_gib(pools)
    if not has_config(train.model.path):
        why = "the model's folder is not on this machine: the run checks its memory when it starts"
        return [(name, "not known", why)]
    try:
        shape = shape_of_folder(train.model.path)
        memory = worker_memory(shape, train, num_workers=fewest_workers, use_gpu=use_gpu)
    except UnknownShape as error:
        return [(name, "not known", f"it cannot be estimated for this model: {error}")]
    of = f" of {size} GiB" if size is not None else ""
    return [(name, f"about {gib(memory.total)}{of}", memory_text(memory))]
