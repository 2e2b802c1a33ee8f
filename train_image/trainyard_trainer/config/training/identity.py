"""The identity of a run: the keys of its config that decide the weights, and so may not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAY_CHANGE = {
    "data": {"decode_workers", "endpoint", "max_bad_samples", "memory_gib", "ray_nodes"},
    "train": {
        "channels_last",
        "compile",
        "epochs",
        "micro_batch_size",
        "prompts",
        "questions",
        "rounds",
    },
}
"""Keys of the sections that make a run's identity, but do not belong to it themselves. Those of LENGTHS may
only be raised. The number of workers belongs to it, too, where `has_fixed_workers`."""

LENGTHS = ("epochs", "rounds")
"""Keys of `train` that say how long a recipe trains; each recipe has one of them."""


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a recipe's run.json that decides the weights; the rest may change."""
    return {
        section: {key: value for key, value in config[section].items() if key not in free}
        for section, free in MAY_CHANGE.items()
    }
