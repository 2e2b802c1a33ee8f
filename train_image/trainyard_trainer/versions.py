"""The versions of what decides how a run goes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

NETWORKS = ("ray", "torch", "torchvision")
"""What decides what a network learns."""

LIBRARIES = (
    *("trainyard", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "deepspeed", "transformers"),
    *("accelerate", "datasets", "peft", "trl", "lightning", "pytorch-lightning"),
)
"""What else the record of an attempt names, if it is installed: trainyard, NCCL, and training libraries."""


def versions(packages: Sequence[str] = NETWORKS) -> dict[str, str]:
    """Of Python and of the packages that decide what is learnt; Ray may be missing."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
