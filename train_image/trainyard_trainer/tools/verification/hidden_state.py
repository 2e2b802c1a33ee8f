"""Find what training changes in a recipe and its network, and what no checkpoint has."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainyard_trainer.recipes.recipe import Recipe

IGNORED = {*vars(nn.Module()), "training"}
"""The attributes that every module of PyTorch has: its parameters, modules and hooks."""

Snapshot = dict[str, str]
"""A short description of each attribute's value, by the attribute's name."""


def snapshot(recipe: Recipe[Any], network: nn.Module) -> Snapshot:
    """Describe the attributes of the recipe and of the network's modules that a checkpoint does not have."""
    found: Snapshot = {}
    for name, value in _attributes(recipe, network):
        description = _described(value)
        if description is not None:
            found[name] = description
    return found


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """Return a line for each attribute whose value differs."""
    return [
        f"{name}: {before.get(name, 'not there')} -> {after.get(name, 'not there')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _attributes(recipe: Recipe[Any], network: nn.Module) -> Iterator[tuple[str, Any]]:
    for owner in (type(recipe), recipe):
        for name, value in vars(owner).items():
            if not name.startswith("__") and not callable(value):
                yield f"recipe.{name}", value
    for path, module in network.named_modules():
        prefix = f"model.{path}." if path else "model."
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}{name} (a buffer with persistent=False)", module._buffers[name]
        for name, value in vars(module).items():
            if name not in IGNORED:
                yield f"{prefix}{name}", value


def _described(value: object) -> str | None:
    """Return a text that changes with the value; None for objects that are not looked into."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case torch.Tensor():
            return f"tensor {_hashed(bytes_of(value))}"
        case np.ndarray():
            return f"array {_hashed(value.tobytes())}"
        case torch.Generator():
            return f"generator {_hashed(value.get_state().numpy().tobytes())}"
        case np.random.Generator():
            return f"generator {_hashed(repr(value.bit_generator.state).encode())}"
        case np.random.RandomState():
            return f"generator {_hashed(repr(value.get_state()).encode())}"
        case random.Random():
            return f"generator {_hashed(repr(value.getstate()).encode())}"
        case list() | tuple():
            return _joined(enumerate(value))
        case Mapping():
            return _joined(value.items())
        case set() | frozenset():
            return _joined(enumerate(sorted(value, key=repr)))
        case _ if is_dataclass(value):
            return _joined((each.name, getattr(value, each.name)) for each in fields(value))
        case _:
            return None


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _joined(items: Any) -> str:
    text = ", ".join(f"{key}: {_described(value)}" for key, value in items)
    return text if len(text) <= 60 else f"{len(text)} characters {_hashed(text.encode())}"


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
