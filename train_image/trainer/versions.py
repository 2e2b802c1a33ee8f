"""The versions of what decides how a run goes."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what is learnt; Ray may be missing."""
    found = {"python": platform.python_version()}
    for name in ("ray", "torch", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
