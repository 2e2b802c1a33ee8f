"""Which runs can replace a lost worker while the others keep their state (`faults.replace_workers`)."""

from __future__ import annotations

from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig

NOT_REPLACED = "lost workers are not replaced one by one ({why}): all workers restart"
"""What the log says if `faults.replace_workers` has no effect."""

SEVERAL_NETWORKS = "the recipe trains several networks in turn"
"""Known only to the workers, which load the recipe: the update of one network cannot be taken back."""


def replaces_workers(config: RecipeConfig) -> bool:
    """Whether lost workers are replaced while the others keep their state."""
    return config.faults.replace_workers and why_not_replaced(config) is None


def why_not_replaced(config: RecipeConfig) -> str | None:
    """Return what of a run makes it impossible to replace a lost worker alone; None if it is possible."""
    if not isinstance(config, TrainerConfig):
        return f"train.recipe = {config.train.recipe}"
    if config.train.strategy != "ddp":
        return f"train.strategy = {config.train.strategy}"
    if config.data.loader != "torch":
        return f"data.loader = {config.data.loader}"
    if config.data.stream:
        return "data.stream = true"
    if config.train.compile:
        return "train.compile = true"
    if config.scaling.use_gpu:
        return "the run has GPUs"
    if config.scaling.is_elastic:
        return "the number of workers is a range"
    return None if config.scaling.num_workers > 1 else "the run has one worker"
