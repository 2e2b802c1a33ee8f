"""Try a recipe of the user on two samples, on the CPU, before any worker is started."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.loss import Evaluation, Loss
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
                evaluation = recipe.evaluate(_only_forward(model), batch)
            if not isinstance(evaluation, Evaluation):
                raise _wrong(name, "evaluate", evaluation, "an Evaluation")
            _require_valid(recipe, evaluation, name, "evaluate")
            _refuse_mean(recipe, model, changed, name)


def _try_training(recipe: Recipe[Any], model: nn.Module, batch: Batch, name: str) -> Batch:
    """Run a forward and a backward pass, and return the batch with its random changes."""
    with user_errors(f"train.recipe = {name}: augment"):
        changed = recipe.augment(batch, seed=0, epoch=0)
    if not isinstance(changed, Batch):
        raise _wrong(name, "augment", changed, "a Batch")
    with user_errors(f"train.recipe = {name}: loss, on a batch with {columns_of(batch)}"):
        loss = recipe.loss(_only_forward(model), changed)
    if not isinstance(loss, Loss):
        raise _wrong(name, "loss", loss, "a Loss")
    _require_valid(recipe, loss, name, "loss")
    with user_errors(f"train.recipe = {name}: loss_weight"):
        weight = recipe.loss_weight(batch)
    if weight is not None and float(weight) != float(loss.weight):
        raise ConfigError(
            f"train.recipe = {name}: loss_weight returned {float(weight):g}, and loss the weight "
            f"{float(loss.weight):g} for the same batch. Both have to be equal."
        )
    with user_errors(f"train.recipe = {name}: the backward pass of its loss"):
        loss.sum.backward()
    without = [
        key for key, each in model.named_parameters() if each.requires_grad and each.grad is None
    ]
    if without:
        raise ConfigError(
            f"train.recipe = {name}: {len(without)} parameters get no gradient: {', '.join(without[:5])}. "
            "Use them in loss, or set requires_grad = False for them in build_model."
        )
    return changed


def _only_forward(model: nn.Module) -> Any:
    """Return the model as recipes get it in training: a function, not a module."""
    return lambda *arguments, **options: model(*arguments, **options)


def _require_valid(recipe: Recipe[Any], found: Loss, name: str, method: str) -> None:
    """Raise ConfigError if a loss has no finite scalar sum, no valid weight, or other metrics."""
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
    declared = {metric.name for metric in recipe.metrics if not metric.is_validation_only}
    if {*found.metrics} != declared:
        raise ConfigError(
            f"{where} the metrics {sorted(found.metrics)}, and the class declares {sorted(declared)} in "
            "`metrics`"
        )


def _refuse_mean(recipe: Recipe[Any], model: nn.Module, batch: Batch, name: str) -> None:
    """Raise ConfigError if the sum of two samples is the mean of their losses."""
    if len(batch) != 2:
        return
    forward = _only_forward(model)
    each = [_loss_of_one(recipe, forward, batch.rows(row, row + 1)) for row in range(2)]
    with user_errors(f"train.recipe = {name}: loss, in evaluation mode"):
        both = recipe.loss(forward, batch).sum.item()
    if None in each:
        return
    first, second = (value or 0.0 for value in each)
    total = first + second
    if math.isclose(both, total / 2, rel_tol=1e-4) and not math.isclose(both, total, rel_tol=1e-4):
        raise ConfigError(
            f"train.recipe = {name}: Loss.sum is a mean: it is {both:.6g} for two samples, and "
            f"{first:.6g} and {second:.6g} for each of them. Return the sum, such as with "
            'reduction="sum".'
        )


def _loss_of_one(recipe: Recipe[Any], forward: Any, sample: Batch) -> float | None:
    """Return the sum of one sample; None if the recipe does not work on a single one."""
    try:
        return recipe.loss(forward, sample).sum.item()
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
