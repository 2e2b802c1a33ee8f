"""Which weights of a network its checkpoints hold: all, or those that the recipe cannot read elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainyard_trainer.errors import RunError
from trainyard_trainer.recipes.recipe import Recipe


def saved_weights(recipe: Recipe[Any], network: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a checkpoint holds by name. They are not copied."""
    if recipe.saves_frozen_weights:
        return network.state_dict()
    frozen = frozen_names(network)
    return {name: each for name, each in network.state_dict().items() if name not in frozen}


def load_weights(recipe: Recipe[Any], network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a checkpoint. Raises RunError if weights are missing that no one else has."""
    if recipe.saves_frozen_weights:
        network.load_state_dict(weights)
        return
    found = network.load_state_dict(weights, strict=False)
    missing = {*found.missing_keys} - frozen_names(network)
    if missing or found.unexpected_keys:
        raise RunError(
            f"the checkpoint does not fit the model: missing: {sorted(missing)[:3]}, "
            f"unknown: {found.unexpected_keys[:3]}"
        )


def frozen_names(network: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {
        name
        for name, each in network.state_dict(keep_vars=True).items()
        if isinstance(each, nn.Parameter) and not each.requires_grad
    }
