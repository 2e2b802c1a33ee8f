"""Make this process one from which others can be forked, and find out why it may not be.

A fork is safe only in a process with one thread that has not used CUDA. Ray draws its ids by a generator that
is seeded when the first id is drawn. After that, all children would draw the same ids. So no id may be drawn
before the fork, which `cause_by_trial` checks.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("numpy", "torch", "torch._dynamo", "torchvision", "pandas", "pyarrow", "pyarrow.dataset"),
    *("PIL.Image", "safetensors.torch", "pydantic", "threadpoolctl"),
)
"""Libraries that workers need; none of them imports Ray."""

RAY_MODULES = (
    *("ray", "ray.train.torch", "ray.train.v2._internal.execution.controller"),
    *("trainyard_trainer.on_ray.driver", "trainyard_trainer.on_ray.worker"),
)
"""What else workers and Ray Train's controller need."""

WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""With these variables, NumPy's OpenBLAS and Arrow's jemalloc start no threads when they are imported."""


def load(modules: Iterable[str]) -> dict[str, str]:
    """Import modules, so that forks have them; return the environment with which they were loaded."""
    environment = load_libraries(())
    with no_ids_drawn():
        for module in modules:
            importlib.import_module(module)
    return environment


def load_libraries(modules: Iterable[str]) -> dict[str, str]:
    """Do as `load`, for modules that do not import Ray."""
    environment = dict(os.environ)
    for name, value in WITHOUT_THREADS.items():
        os.environ.setdefault(name, value)
    for module in modules:
        importlib.import_module(module)
    return environment


@contextmanager
def no_ids_drawn() -> Iterator[None]:
    """Let the classes that `ray.remote` decorates in this block get ids that are not drawn by Ray."""
    import ray.actor

    actor: Any = ray.actor
    original = actor.ActorClassID

    class SystemIds:
        @staticmethod
        def from_random() -> Any:
            return original(os.urandom(original.size()))

    actor.ActorClassID = SystemIds
    try:
        yield
    finally:
        actor.ActorClassID = original


def keep_memory_shared() -> None:
    """Let a later collection of garbage in a child write to no memory that was there before the fork."""
    gc.collect()
    gc.freeze()


def cause_not_to_fork() -> str | None:
    """Return why a child of this process would not be safe, or None."""
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        return f"the process that forks them has {len(threads)} threads: {', '.join(threads)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in the process that forks them"
    return None


def cause_by_trial() -> str | None:
    """Fork two children, and return what shows in them that workers must not be forked, or None."""
    (first, is_cuda_lost), (second, _) = _try_child(), _try_child()
    if first == second:
        return "an id of Ray was drawn before the fork, so that all workers would draw the same ids"
    if is_cuda_lost:
        return "CUDA was used in the process that forks them"
    return None


def _try_child() -> tuple[bytes, bool]:
    """Return the id of Ray that a child of this process draws, and whether it cannot use CUDA."""
    import torch
    from ray import NodeID

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        # PyTorch builds without CUDA have no such function.
        is_cuda_lost = getattr(torch._C, "_cuda_isInBadFork", lambda: False)()
        os.write(write, bytes([is_cuda_lost]) + NodeID.from_random().binary())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        found = told.read()
    os.waitpid(pid, 0)
    return found[1:], bool(found[0])
