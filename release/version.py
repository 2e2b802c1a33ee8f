"""The version of a release: one number in pyproject.toml, repeated where another tool must read it."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib
import yaml

ROOT = Path(__file__).resolve().parents[1]


def project_version() -> str:
    """Return `project.version` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def repeated_versions() -> dict[str, str]:
    """Return the version in each other place that names it, by the place."""
    chart = yaml.safe_load((ROOT / "charts/trainyard/Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((ROOT / "charts/trainyard/values.yaml").read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return {
        "charts/trainyard/Chart.yaml: version": chart["version"],
        "charts/trainyard/Chart.yaml: appVersion": chart["appVersion"],
        "charts/trainyard/values.yaml: tag of image": values["image"].rpartition(":")[2],
        "CHANGELOG.md: first entry": headings[0],
    }


def wrong_versions() -> list[str]:
    """Return a line for each place whose version differs from pyproject.toml's."""
    version = project_version()
    return [
        f"{place} is {found}, and pyproject.toml has {version}"
        for place, found in repeated_versions().items()
        if found != version
    ]
