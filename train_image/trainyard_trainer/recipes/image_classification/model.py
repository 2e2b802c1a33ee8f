"""The network of a run: a torchvision model, made to fit the data."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.errors import ConfigError


def build_model(config: Model) -> nn.Module:
    """The torchvision model with random weights, for this many channels and classes.

    Raises ConfigError.
    """
    from torchvision import (
        models,  # here, because the import takes a second that other recipes need not pay
    )

    model = models.get_model(_known(config.name), weights=None, **_options(config))
    name, first = _first_convolution(model, config.name)
    if first.in_channels != config.in_channels:
        _replace(model, name, _with_channels(first, config.in_channels))
    return model


def check_model(config: Model) -> int:
    """Number of parameters, after one image of the right shape went through without being computed.

    Raises ConfigError.
    """
    with torch.device("meta"):
        model = build_model(config).eval()
        image = torch.empty(1, config.in_channels, config.image_size, config.image_size)
        try:
            model(image)
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"train.model.name = {config.name} cannot take images of train.model.image_size = "
                f"{config.image_size}: {reason}\n       Use a larger image_size, such as 224."
            ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def takes_one_image(config: Model) -> bool:
    """Whether the model can learn from a batch of one: batch norm wants more than one value."""
    with torch.device("meta"):
        model = build_model(config).train()
        try:
            model(torch.empty(1, config.in_channels, config.image_size, config.image_size))
        except ValueError:
            return False
    return True


def check_fit(config: Model, images: DatasetInfo) -> None:
    """Raises ConfigError if the model is for other images than the data has."""
    if images.kind != "images":
        raise ConfigError(
            f"{images.source} is {images.kind}, and train.recipe = image_classification learns from images. "
            "Use images, or train.recipe: language_model."
        )
    problems = [
        f"train.model.{field} = {wanted}, but {images.source} has {what}: use {found}."
        for field, wanted, found, what in (
            ("in_channels", config.in_channels, images.shape[0], f"{images.shape[0]} channel(s)"),
            (
                "num_classes",
                config.num_classes,
                len(images.classes),
                f"{len(images.classes)} classes",
            ),
        )
        if wanted != found
    ]
    if problems:
        raise ConfigError("\n       ".join(problems))


def _known(name: str) -> str:
    """Raises ConfigError with the nearest right names."""
    from torchvision import models

    names = models.list_models(module=models)
    if name in names:
        return name
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(names)}."
    raise ConfigError(
        f"train.model.name = {name} is not a torchvision classification model.\n       {hint}"
    )


def _options(config: Model) -> dict[str, object]:
    """What a model's constructor takes beside the number of classes."""
    options: dict[str, object] = {"num_classes": config.num_classes}
    if config.name.startswith("vit_"):
        options["image_size"] = config.image_size
    if config.name.startswith("maxvit"):
        options["input_size"] = (config.image_size, config.image_size)
    if config.name in ("googlenet", "inception_v3"):
        # Their extra heads are for training on large images with a loss of their own.
        options |= {"aux_logits": False, "init_weights": True}
    return options


def _first_convolution(model: nn.Module, name: str) -> tuple[str, nn.Conv2d]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return path, module
    raise ConfigError(f"train.model.name = {name} has no convolution to take in_channels.")


def _with_channels(first: nn.Conv2d, in_channels: int) -> nn.Conv2d:
    kept = (
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )
    options: dict[str, Any] = {key: getattr(first, key) for key in kept}
    new = nn.Conv2d(in_channels, bias=first.bias is not None, **options)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    return new


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
