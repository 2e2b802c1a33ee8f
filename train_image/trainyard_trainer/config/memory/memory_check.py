"""Compare the estimated memory of a run of `causal_lm` with that of its GPUs, and say what would fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard_trainer.config.memory.model_memory import RESERVE_BYTES, WorkerMemory, worker_memory
from trainyard_trainer.config.memory.model_shape import ModelShape, UnknownShape, model_shape
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.models import Lora
from trainyard_trainer.config.training.train import CausalLm

GIB = 2**30


def has_config(path: str) -> bool:
    """Return whether the folder of a model is on this machine."""
    return (Path(path) / "config.json").is_file()


def shape_of_folder(path: str) -> ModelShape:
    """Return the sizes of the model in a folder. Raises UnknownShape if they cannot be told."""
    try:
        found = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnknownShape(f"its config.json is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnknownShape("its config.json holds no object")
    return model_shape(found)


def memory_text(memory: WorkerMemory) -> str:
    """Return the parts of a worker's memory as one line.

    >>> memory_text(WorkerMemory(parameters=GIB, gradients=GIB, optimizer=2 * GIB, activations=GIB // 2))
    'parameters 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB, activations 0.5 GiB'
    """
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
    }
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items())


def gib(size: int) -> str:
    """Return a number of bytes in GiB, with one digit."""
    return f"{size / GIB:,.1f} GiB"


def shortage(
    shape: ModelShape, train: CausalLm, *, num_workers: int, gpu_bytes: int
) -> tuple[str, ...]:
    """Return why a run does not fit its GPUs and what would lower its memory, as lines; () if it fits."""
    memory = worker_memory(shape, train, num_workers=num_workers, use_gpu=True)
    usable = gpu_bytes - RESERVE_BYTES
    if memory.total <= usable:
        return ()
    remedies = []
    for words, changed in _remedies(train, num_workers):
        total = worker_memory(shape, changed, num_workers=num_workers, use_gpu=True).total
        if total < memory.total:
            remedies.append(f"{words}: {gib(total)}{', which fits' if total <= usable else ''}")
    return (
        f"train.model.path = {train.model.path} needs about {gib(memory.total)} of memory per GPU, and a GPU "
        f"has {gib(gpu_bytes)}, of which about {gib(RESERVE_BYTES)} is CUDA's",
        f"It needs {memory_text(memory)}.",
        *remedies,
    )


def shortage_of_folder(
    path: str, train: CausalLm, *, num_workers: int, gpu_bytes: int
) -> tuple[str, ...]:
    """Return the same for the model in a folder; () also if its memory cannot be estimated."""
    try:
        shape = shape_of_folder(path)
        return shortage(shape, train, num_workers=num_workers, gpu_bytes=gpu_bytes)
    except UnknownShape:
        return ()


def _remedies(train: CausalLm, num_workers: int) -> Iterator[tuple[str, CausalLm]]:
    """Yield changes of a run file that lower its memory, one by one and together with those before."""
    for index, (words, update) in enumerate(changes := [*_changes(train, num_workers)]):
        yield words, _changed(train, update)
        if index:
            together = train
            for _, each in changes[: index + 1]:
                together = _changed(together, each)
            yield f"{words}, with {'the change' if index == 1 else 'all changes'} above", together


def _changes(train: CausalLm, num_workers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield single changes, those that change least first."""
    if not train.model.gradient_checkpointing:
        yield (
            "train.model.gradient_checkpointing: true",
            {"model": {"gradient_checkpointing": True}},
        )
    if share_batch(train, num_workers).micro_batch_size > 1:
        yield "train.micro_batch_size: 1", {"micro_batch_size": 1}
    if train.strategy == "ddp" and num_workers > 1:
        yield f"train.strategy: fsdp2 over {num_workers} workers", {"strategy": "fsdp2"}
    if train.model.adapter is None and train.ema_decay is None:
        yield "train.model.adapter: {kind: lora}", {"model": {"adapter": Lora(kind="lora")}}


def _changed(train: CausalLm, update: dict[str, Any]) -> CausalLm:
    of_model = update.get("model")
    if of_model is None:
        return train.model_copy(update=update)
    return train.model_copy(update={"model": train.model.model_copy(update=of_model)})
