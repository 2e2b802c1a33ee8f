"""The packages that `make gpu` needs, read from pyproject.toml with the standard library alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

MACHINE = "gpu-machine"
"""Dependency group of what the GPU machine must have."""
WHEELS = "gpu-wheels"
"""Dependency group of what `make gpu-wheels` downloads."""


def requirements_in(group: str) -> list[str]:
    """Return a dependency group of pyproject.toml."""
    found: list[str] = tomllib.loads(PYPROJECT.read_text())["dependency-groups"][group]
    return found


def name_of(requirement: str) -> str:
    """Return the package's name: `torch` of `torch>=2.11`."""
    return re.split(r"[^\w.-]", requirement)[0]


def problems_with(requirements: Iterable[str]) -> list[str]:
    """Return what is missing or too old here, such as `torch>=2.11 (found 2.9.1)`."""
    problems = []
    for requirement in requirements:
        try:
            found = metadata.version(name_of(requirement))
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement} (not installed)")
            continue
        least = requirement.partition(">=")[2]
        if least and release(found) < release(least):
            problems.append(f"{requirement} (found {found})")
    return problems


def release(version: str) -> tuple[int, ...]:
    """Return the numbers a version begins with: (2, 11, 0) of `2.11.0+cu130`."""
    return tuple(int(each) for each in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))
