"""Recipes with several networks, each of which is trained by an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from trainyard_trainer.config.training.own_recipe import OwnRecipe
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.recipe import Forward, Networks, Recipe


def model_for(
    recipe: Recipe[Any], network: nn.Module, forward: Callable[[nn.Module], Forward]
) -> Forward | Networks:
    """Return what the recipe's methods get as `model`.

    It is the forward pass of the model, or those of its children by name if the recipe has `networks`.
    """
    if not recipe.networks:
        return forward(network)
    return {name: forward(child) for name, child in network.named_children()}


def parts_of(recipe: Recipe[Any], network: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward passes the recipe's methods call: the model, or its children."""
    return [*network.children()] if recipe.networks else [network]


def networks_of(recipe: Recipe[Any], network: nn.Module) -> dict[str | None, nn.Module]:
    """Return the networks that are trained by an optimizer each: the model, or some of its children."""
    if not recipe.networks:
        return {None: network}
    return {name: network.get_submodule(name) for name in recipe.networks}


def require_networks(recipe: Recipe[Any], train: Train, network: nn.Module) -> None:
    """Raise ConfigError if the names of the recipe's networks do not fit its model or the run file."""
    children = [name for name, _ in network.named_children()]
    for name in recipe.networks:
        if name not in children:
            raise ConfigError(
                f"{recipe.title()}.networks has {name!r}, and the model of build_model has the children "
                f"{', '.join(children) or 'none'}. Return a module with that child, such as "
                f"nn.ModuleDict({{{name!r}: ...}})."
            )
    if isinstance(train, OwnRecipe):
        for name in train.optimizers:
            if name not in recipe.networks:
                raise ConfigError(
                    f"train.optimizers has {name!r}, and the recipe trains "
                    f"{', '.join(recipe.networks) or 'its model with one optimizer'}. Remove it, or add it "
                    f"to {recipe.title()}.networks."
                )
    if recipe.networks and train.strategy == "deepspeed":
        raise ConfigError(
            f"{recipe.title()} trains the networks {', '.join(recipe.networks)} in turn, and an engine of "
            "DeepSpeed has one model and one optimizer. Use train.strategy: fsdp2, or ddp."
        )
    own = [name for name, _ in network.named_parameters(recurse=False)]
    if recipe.networks and own and train.strategy == "fsdp2":
        raise ConfigError(
            f"{recipe.title()}.build_model returns a module with the parameters {', '.join(own)} beside its "
            "networks. train.strategy = fsdp2 shards its children alone: move them into one of these."
        )


@contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Compute no gradients of these parameters, all of which have some otherwise."""
    frozen = list(parameters)
    for each in frozen:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(True)
