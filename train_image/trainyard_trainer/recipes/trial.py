"""Try a recipe of the user on two samples, on the CPU, before any worker is started."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.loss import Evaluation, Loss
from trainyard_trainer.recipes.networks import model_for, networks_of, without_gradients
from trainyard_trainer.recipes.recipe import Recipe
from trainyard_trainer.user_import import user_errors

LARGEST_MODEL = 50_000_000
"""The largest number of parameters with which a recipe is tried: the driver's pod has little memory."""


def try_recipe(recipe: Recipe[Any], batch: Batch, name: str) -> None:
    """Run each step of training once and raise ConfigError for what would fail on the workers.

    `batch` has the first samples of the data. Found are: errors in the recipe's methods, results of a wrong
    type, shape or device, a loss that is not finite or that is a mean, missing metrics, and parameters
    without a gradient.
    """
    with torch.random.fork_rng(devices=[]):
        with user_errors(f"train.recipe = {name}: build_model"):
            model = recipe.build_model()
        if not isinstance(model, nn.Module):
            raise _wrong(name, "build_model", model, "a torch.nn.Module")
        if sum(each.numel() for each in model.parameters()) > LARGEST_MODEL:
            return
        changed = _try_training(recipe, model, batch, name)
        model.eval()
        with torch.no_grad():
            with user_errors(f"train.recipe = {name}: evaluate"):
                passes: Any = model_for(recipe, model, _only_forward)
                evaluation = recipe.evaluate(passes, batch)
            if not isinstance(evaluation, Evaluation):
                raise _wrong(name, "evaluate", evaluation, "an Evaluation")
            _require_valid(evaluation, name, "evaluate")
            _require_metrics(recipe, [*evaluation.metrics], name, "evaluate")
            for network in networks_of(recipe, model):
                _refuse_mean(recipe, model, network, changed, name)


def _try_training(recipe: Recipe[Any], model: nn.Module, batch: Batch, name: str) -> Batch:
    """Run the passes of a training step, and return the batch with its random changes."""
    with user_errors(f"train.recipe = {name}: augment"):
        changed = recipe.augment(batch, seed=0, epoch=0)
    if not isinstance(changed, Batch):
        raise _wrong(name, "augment", changed, "a Batch")
    if not recipe.networks:
        loss = _try_loss(recipe, model, None, changed, name)
        _require_metrics(recipe, [*loss.metrics], name, "loss")
        _try_loss_weight(recipe, batch, loss, name)
        return changed
    found: list[str] = []
    parts = networks_of(recipe, model)
    for network in parts:
        others = [each for key, part in parts.items() if key != network for each in _trained(part)]
        with without_gradients(others):
            found += _try_loss(recipe, model, network, changed, name).metrics
    _require_metrics(recipe, found, name, "network_loss")
    return changed


def _try_loss(
    recipe: Recipe[Any], model: nn.Module, network: str | None, batch: Batch, name: str
) -> Loss:
    """Run the forward and the backward pass of the loss of a network; None is the whole model."""
    method = "loss" if network is None else f"network_loss of {network!r}"
    with user_errors(f"train.recipe = {name}: {method}, on a batch with {columns_of(batch)}"):
        loss = _loss_of(recipe, model, network, batch)
    if not isinstance(loss, Loss):
        raise _wrong(name, method, loss, "a Loss")
    _require_valid(loss, name, method)
    with user_errors(f"train.recipe = {name}: the backward pass of its {method}"):
        loss.sum.backward()
    without = [
        key
        for key, each in networks_of(recipe, model)[network].named_parameters()
        if each.requires_grad and each.grad is None
    ]
    if without:
        raise ConfigError(
            f"train.recipe = {name}: {len(without)} parameters get no gradient: {', '.join(without[:5])}. "
            f"Use them in {method}, or set requires_grad = False for them in build_model."
        )
    return loss


def _try_loss_weight(recipe: Recipe[Any], batch: Batch, loss: Loss, name: str) -> None:
    """Raise ConfigError if `loss_weight` returns another weight than `loss`."""
    with user_errors(f"train.recipe = {name}: loss_weight"):
        weight = recipe.loss_weight(batch)
    if weight is not None and float(weight) != float(loss.weight):
        raise ConfigError(
            f"train.recipe = {name}: loss_weight returned {float(weight):g}, and loss the weight "
            f"{float(loss.weight):g} for the same batch. Both have to be equal."
        )


def _loss_of(recipe: Recipe[Any], model: nn.Module, network: str | None, batch: Batch) -> Loss:
    """Return the loss of a network; None is the whole model."""
    passes: Any = model_for(recipe, model, _only_forward)
    if network is None:
        return recipe.loss(passes, batch)
    return recipe.network_loss(network, passes, batch)


def _trained(network: nn.Module) -> list[Tensor]:
    return [each for each in network.parameters() if each.requires_grad]


def _only_forward(model: nn.Module) -> Any:
    """Return the model as recipes get it in training: a function, not a module."""
    return lambda *arguments, **options: model(*arguments, **options)


def _require_valid(found: Loss, name: str, method: str) -> None:
    """Raise ConfigError if a loss has no finite scalar sum or no valid weight."""
    where = f"train.recipe = {name}: {method} returned"
    if not isinstance(found.sum, Tensor) or found.sum.dim() or not found.sum.is_floating_point():
        shape = tuple(found.sum.shape) if isinstance(found.sum, Tensor) else found.sum
        raise ConfigError(f"{where} sum = {shape}; it has to be a scalar floating-point tensor")
    if not torch.isfinite(found.sum):
        raise ConfigError(f"{where} sum = {found.sum.item()} for the first samples of the data")
    if isinstance(found.weight, Tensor):
        is_weight = not found.weight.dim() and bool(found.weight >= 0)
    else:
        is_weight = type(found.weight) is int and found.weight > 0
    if not is_weight:
        raise ConfigError(
            f"{where} weight = {found.weight!r}; it has to be the number of samples (or tokens, or pixels) "
            "in the sum: an int, or a scalar tensor"
        )


def _require_metrics(recipe: Recipe[Any], found: list[str], name: str, method: str) -> None:
    """Raise ConfigError unless the losses have the metrics that the class declares, each once."""
    declared = [metric.name for metric in recipe.metrics if not metric.is_validation_only]
    if sorted(found) != sorted(declared):
        raise ConfigError(
            f"train.recipe = {name}: {method} returned the metrics {sorted(found)}, and the class declares "
            f"{sorted(declared)} in `metrics`"
        )


def _refuse_mean(
    recipe: Recipe[Any], model: nn.Module, network: str | None, batch: Batch, name: str
) -> None:
    """Raise ConfigError if the sum of two samples is the mean of their losses."""
    if len(batch) != 2:
        return
    each = [_loss_of_one(recipe, model, network, batch.rows(row, row + 1)) for row in range(2)]
    method = "loss" if network is None else f"network_loss of {network!r}"
    with user_errors(f"train.recipe = {name}: {method}, in evaluation mode"):
        both = _loss_of(recipe, model, network, batch).sum.item()
    if None in each:
        return
    first, second = (value or 0.0 for value in each)
    total = first + second
    if math.isclose(both, total / 2, rel_tol=1e-4) and not math.isclose(both, total, rel_tol=1e-4):
        raise ConfigError(
            f"train.recipe = {name}: {method}: Loss.sum is a mean: it is {both:.6g} for two samples, and "
            f"{first:.6g} and {second:.6g} for each of them. Return the sum, such as with "
            'reduction="sum".'
        )


def _loss_of_one(
    recipe: Recipe[Any], model: nn.Module, network: str | None, sample: Batch
) -> float | None:
    """Return the sum of one sample; None if the recipe does not work on a single one."""
    try:
        return _loss_of(recipe, model, network, sample).sum.item()
    except Exception:  # noqa: BLE001 - the recipe may raise anything
        return None


def columns_of(batch: Batch) -> str:
    """Describe the columns of a batch: name, data type and shape of each."""
    shown = [
        f"{name} {str(batch[name].dtype).removeprefix('torch.')} {tuple(batch[name].shape)}"
        for name in batch
    ]
    return ", ".join(shown) or "no columns"


def _wrong(name: str, method: str, found: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"train.recipe = {name}: {method} returned {type(found).__name__}; it has to return {wanted}"
    )
