"""Which runs can keep each worker's newest state in the memory of their nodes (`faults.keep_state`)."""

from __future__ import annotations

import sys

from trainyard_trainer.config.replaceable import replaces_workers
from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig

NOT_KEPT = (
    "faults.keep_state has no effect ({why}): if all workers restart, they repeat the steps since the last "
    "checkpoint"
)
"""What the log says if `faults.keep_state` has no effect."""


def keeps_state(config: RecipeConfig) -> bool:
    """Whether each worker's newest state is kept in memory beyond the end of its process."""
    return config.faults.keep_state and why_not_kept(config) is None


def why_not_kept(config: RecipeConfig) -> str | None:
    """Return what of a run makes it impossible to keep its state in memory; None if it is possible."""
    if not isinstance(config, TrainerConfig):
        return f"train.recipe = {config.train.recipe}"
    if config.data.loader != "torch":
        return f"data.loader = {config.data.loader}"
    if replaces_workers(config):
        return "faults.replace_workers = true: the other workers keep their state"
    return (
        None if sys.platform == "linux" else f"{sys.platform} has no memory that outlives a process"
    )
