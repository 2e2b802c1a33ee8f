"""The speed of training in the recipe's own units, and the share of the hardware's peak that it uses."""

from __future__ import annotations

from typing import Any

from trainyard_trainer.hardware import peak_flops
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.recipe import Recipe


def speeds_in(recipe: Recipe[Any], samples_per_s: float, worker: Worker | None) -> dict[str, float]:
    """Return the speed in further units, by the metrics' names in `run_folder.metrics`.

    With one of the training workers, on a GPU whose peak is known, and for a recipe that knows its FLOPs,
    `mfu` is among them: the share of the GPUs' peak that the model's own arithmetic takes (Chowdhery et al.:
    PaLM, 2022, appendix B).
    """
    speeds = recipe.speeds(samples_per_s)
    flops = recipe.flops_per_sample()
    peak = peak_flops(worker.device) if worker else None
    if worker and peak and flops:
        speeds["mfu"] = samples_per_s * flops / (worker.world_size * peak)
    return speeds
