"""Changes of nested settings, as tests and benches write them: `train__epochs=3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def set_all(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set the values of nested keys in place, whose names are joined by `__`, and return the settings."""
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = settings
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return settings
