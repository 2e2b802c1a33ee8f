"""The digits run and the packaged platform, as the launcher reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.platform import Platform, load_platform, parse_platform
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples/digits.yaml"


@pytest.fixture(scope="session")
def platform() -> Platform:
    return load_platform(None)


@pytest.fixture
def run() -> RunConfig:
    return load_run(DIGITS)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """A run file like digits.yaml, with some keys changed."""

    def write(changes: dict[str, Any]) -> Path:
        document = yaml.safe_load(DIGITS.read_text()) | changes
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.fixture(scope="session")
def platform_with() -> Callable[..., Platform]:
    """The packaged platform with the first pool of each name changed."""
    document = yaml.safe_load((ROOT / "launcher/trainyard/platform.yaml").read_text())

    def change(**pools: dict[str, Any]) -> Platform:
        changed = copy.deepcopy(document)
        for pool in changed["pools"]:
            pool.update(pools.get(pool["name"], {}))
        return parse_platform(yaml.safe_dump(changed), "test")

    return change
